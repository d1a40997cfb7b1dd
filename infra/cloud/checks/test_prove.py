import pathlib
import re
import shutil
import tempfile

import sweeper
from tests.peer import PeerCase

from .runbooks import FOLDER, commands, execute
from .test_stack import deployed
from .test_sweeper import LONGEST

OURS, REGION = "0a1b2c3d", "us-east-1"


class Prove(PeerCase):
    """An account in which time passes while somebody waits: the guest's timer, the schedules and the sweeper do their part."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        (self.folder / "infra").symlink_to(FOLDER.parent / "infra")
        # What time it is, is what time it is in the cloud.
        (self.folder / "bin").mkdir()
        clock = self.folder / "bin/date"
        clock.write_text('#!/bin/sh\n[ "$*" = +%s ] || exec /bin/date "$@"\ncat "$HOME/now"\n')
        clock.chmod(0o755)
        self.shadow = None
        told = deployed(self, "stack", REGION, OURS, CoordinatorPrincipal="arn:aws:iam::123456789012:root")
        self.canary = (told["CanaryRegion"], told["CanaryInstance"])
        self.client("ec2").stop_instances(InstanceIds=[told["CanaryInstance"]])
        self.client("scheduler").create_schedule_group(Name=f"drums-{OURS}")
        tags = {"drums:installation": OURS}
        names = {"COORDINATOR": "coordinator", "SWEEPER": "sweeper", f"drums-schedule-{OURS}": "schedule"}
        self.control("POST", "principals", {key: {"policy": policy, "tags": tags} for key, policy in names.items()})

    def a_minute_passes(self):
        self.advance(60)
        for seen in self.control("GET", "instances"):
            timer = re.search(r"^d=(\d+) |^DEADLINE_S=(\d+)$", seen["user_data"], re.M)
            if timer and int(timer[1] or timer[2]) <= self.now() and seen["state"] == "running":
                self.control("POST", "guest", {"instance": seen["id"], "event": "poweroff"})
        if self.shadow is not None:
            now = sweeper.datetime.fromtimestamp(self.now(), sweeper.timezone.utc)
            client = lambda region: self.client("ec2", region, key_id="SWEEPER")  # noqa: E731
            sweeper.Sweep(client, OURS, {self.canary}, LONGEST, self.shadow, now).run()

    def time_passes(self, until):
        for _ in range(30):
            if until():
                return
            self.a_minute_passes()
        self.fail("nothing has ended it for half an hour")

    def run_row(self, command):
        if match := re.match("aws cloudformation deploy .*Shadow=(yes|no)$", command):
            # moto updates no stack that has what it cannot make.
            self.shadow = match[1] == "yes"
            return
        if command.startswith("aws ec2 wait"):
            id_ = (self.folder / "id").read_text().strip()
            self.time_passes(lambda: self.state(id_) == "terminated")
        elif command.startswith("for _ in"):
            # It asks for fifteen minutes.
            for _ in range(10):
                self.a_minute_passes()
        (self.folder / "now").write_text(str(int(self.now())))
        # The profile takes the coordinator's role.
        key = "COORDINATOR" if "--profile drums-coordinator" in command else "TEST"
        plain = command.replace(" --profile drums-coordinator", "")
        done = execute(plain, self.folder, self.endpoint, key)
        self.assertEqual(done.returncode, 0, f"`{command}`: {done.stdout}{done.stderr}")

    def test_the_runbook_for_proving_the_layers_works_as_written(self):
        for command in commands("prove-kill-layers.md"):
            self.run_row(command)
        left = [i for i in self.control("GET", "instances") if i["state"] != "terminated"]
        self.assertEqual([i["id"] for i in left], [self.canary[1]])
        # Each was ended by whom it was to be ended by.
        ended = [e for e in self.control("GET", "journal") if e.get("action") in ("TerminateInstances", "poweroff")]
        by = [e["by"] for e in ended if e.get("status", 200) == 200 and "error" not in e]
        self.assertEqual(by, ["guest", "guest", "scheduler", "SWEEPER", "TEST"])
        # The unit's part of user data is whole.
        (second,) = [i for i in self.control("GET", "instances") if (i["client_token"] or "").endswith(f"{2:016x}-0001")]
        for path in ("cloud/guest/drums-deadline", "units/drums-deadline.service"):
            self.assertIn((FOLDER.parent / "infra" / path).read_text(), second["user_data"])
        self.assertNotIn("nohup", second["user_data"])
