import datetime
import pathlib
import shutil
import tempfile

import sweeper
from tests.peer import PeerCase

from .runbooks import commands, execute
from .test_sweeper import LONGEST

OURS, THEIRS = "0a1b2c3d", "99999999"
US, EU = "us-east-1", "eu-central-1"


class Overdue(PeerCase):
    """The runbooks for hosts that should be dead, and for those that cost too much."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for installation in (OURS, THEIRS):
            cls().control("POST", "role", {"profile": f"drums-host-{installation}"})

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        # What time it is, is what time it is in the cloud.
        (self.folder / "bin").mkdir()
        clock = self.folder / "bin/date"
        clock.write_text('#!/bin/sh\nexec /bin/date -d "@$(cat "$HOME/now")" "$@"\n')
        clock.chmod(0o755)
        self.control("POST", "principals", {"SWEEPER": {"policy": "sweeper", "tags": {"drums:installation": OURS}}})

    def host(self, region, number, in_s, installation=OURS, campaign="c1"):
        due = datetime.datetime.fromtimestamp(int(self.now()) + in_s, datetime.UTC)
        token = f"drums1-{installation}-{int(due.timestamp()):010x}-{number:016x}-0001"
        tags = {"drums:installation": installation, "drums:campaign": campaign, "drums:token": token}
        tags["drums:deadline"] = f"{due:%Y-%m-%dT%H:%M:%SZ}"
        pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
        specs = [{"ResourceType": kind, "Tags": pairs} for kind in ("instance", "volume")]
        profile = {"Name": f"drums-host-{installation}"}
        ec2 = self.client("ec2", region)
        return self.launch(ec2, ClientToken=token, TagSpecifications=specs, IamInstanceProfile=profile)

    def done(self, command, code=0):
        (self.folder / "now").write_text(str(int(self.now())))
        done = execute(command, self.folder, self.endpoint)
        self.assertEqual(done.returncode, code, f"`{command}`: {done.stdout}{done.stderr}")

    def named(self, file):
        return {line.split()[1] for line in (self.folder / file).read_text().splitlines()}

    def test_the_runbook_for_a_host_that_will_not_die_works_as_written(self):
        us, eu = self.client("ec2", US), self.client("ec2", EU)
        protected, stopped, plain, hangs = self.host(US, 1, -60), self.host(EU, 2, -60), self.host(EU, 3, -1), self.host(US, 4, -60)
        spared = [self.host(US, 5, 3600), self.host(EU, 6, -60, THEIRS), self.launch(us)]
        self.control("POST", "edit", {"instance": protected, "disable_api_stop": True, "disable_api_termination": True})
        eu.stop_instances(InstanceIds=[stopped])
        self.control("POST", "settings", {"seconds": {"shutting-down": None}})
        us.terminate_instances(InstanceIds=[hangs])
        self.control("POST", "settings", {"seconds": {"shutting-down": 0}})

        lines = commands("a-host-that-will-not-die.md")
        act = next(n for n, line in enumerate(lines) if "terminate-instances" in line)
        for line in lines[:act]:
            self.done(line)
        self.assertEqual(self.named("overdue"), {protected, stopped, plain})
        why = (self.folder / "why").read_text()
        self.assertEqual(why.count('"Value": true'), 2, why)
        # Before anything was done the last command fails: it can.
        for line in lines[act + 2 : -1]:
            self.done(line)
        self.done(lines[-1], code=1)
        for line in lines[act:]:
            self.done(line)
        self.assertEqual([self.state(i) for i in (protected, stopped, plain)], ["terminated"] * 3)
        self.assertEqual([self.state(i) for i in spared], ["running"] * 3)

    def test_a_region_that_does_not_answer_is_named_and_is_not_without_overdue_hosts(self):
        self.fault(action="DescribeInstances", region="us-west-2", code="AuthFailure", status=401, count=None)
        for line in commands("a-host-that-will-not-die.md")[:3]:
            self.done(line)
        self.assertIn("NOT-SEEN", self.named("overdue"))

    def test_the_runbook_for_a_budget_that_is_exceeded_works_as_written(self):
        over = [self.host(US, 11, 3600), self.host(EU, 12, 3600)]
        others = [self.host(US, 13, 3600, campaign="c2"), self.host(EU, 14, 3600, THEIRS)]
        us = self.client("ec2", US)
        canary = self.launch(
            us,
            TagSpecifications=[
                {
                    "ResourceType": "instance",
                    "Tags": [{"Key": "drums:installation", "Value": OURS}, {"Key": "drums:role", "Value": "canary"}],
                }
            ],
        )
        us.stop_instances(InstanceIds=[canary])
        lines = commands("budget-exceeded.md")
        for line in lines:
            if "wait instance-terminated" in line:
                # They are told, and nobody has swept yet.
                self.assertEqual([self.state(i) for i in over], ["running"] * 2)
                # The deadline is now; a minute later the deployed sweeper has been there.
                self.advance(60)
                now = datetime.datetime.fromtimestamp(self.now(), datetime.UTC)
                client = lambda region: self.client("ec2", region, key_id="SWEEPER")  # noqa: E731
                sweeper.Sweep(client, OURS, {(US, canary)}, LONGEST, False, now).run()
            self.done(line)
        self.assertEqual(self.named("over"), set(over))
        self.assertEqual([self.state(i) for i in over], ["terminated"] * 2)
        self.assertEqual([self.state(i) for i in others], ["running"] * 2)
        self.assertIn(others[0], self.named("hosts"))
