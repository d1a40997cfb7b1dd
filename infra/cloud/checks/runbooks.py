"""Runbooks' commands as they stand: the lines of their `sh` blocks, one shell each, as tests/it/live_runbooks.rs has it."""

import os
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "runbooks"


def commands(runbook):
    found, inside = [], False
    for line in (FOLDER / runbook).read_text().splitlines():
        if line in ("```sh", "```"):
            inside = line == "```sh"
        elif inside and line:
            found.append(line)
    assert found, f"{runbook} has no commands"
    return found


def execute(command, folder, endpoint, key="TEST"):
    """One command, in a shell that an operator's credentials and the tests' AWS are put into from outside. Programs in the
    folder's `bin` stand before the machine's."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    # By its option, for whatever the environment says `aws sqs` goes to an old name of its own in us-east-1.
    aws = pathlib.Path(sys.executable).with_name("aws")
    (programs / "aws").write_text(f'#!/bin/sh\nexec {aws} --endpoint-url "{endpoint}" "$@"\n')
    (programs / "aws").chmod(0o755)
    env = {
        "PATH": f"{programs}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "HOME": str(folder),
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_PAGER": "",
    }
    return subprocess.run(
        ["sh", "-ec", command], cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
