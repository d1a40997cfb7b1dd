import pathlib
import shutil
import tempfile

from tests.peer import PeerCase

from .runbooks import commands, execute
from .test_stack import deployed

RUNBOOK = "clean-an-account.md"
OURS, THEIRS = "0a1b2c3d", "99999999"
REGIONS = ("us-east-1", "eu-central-1")


class Clean(PeerCase):
    def host(self, region, number, installation=OURS, **tags):
        """A host as it is launched, with its tags and its profile; tags that are None are left out."""
        due = int(self.now()) + 3600
        whole = {"drums:installation": installation, "drums:deadline": "2999-01-01T00:00:00Z"}
        whole |= {key.replace("_", ":"): value for key, value in tags.items()}
        pairs = [{"Key": key, "Value": value} for key, value in whole.items() if value]
        token = f"drums1-{installation}-{due:010x}-{number:016x}-0001"
        specs = [{"ResourceType": kind, "Tags": pairs} for kind in ("instance", "volume") if pairs]
        return self.launch(self.client("ec2", region), ClientToken=token, TagSpecifications=specs)

    def test_the_runbook_for_cleaning_an_account_works_as_written(self):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        us, eu = (self.client("ec2", region) for region in REGIONS)
        told = [
            deployed(self, "stack", REGIONS[0], OURS, CoordinatorPrincipal="arn:aws:iam::123456789012:root"),
            deployed(self, "region", REGIONS[1], OURS),
        ]
        canaries = [outputs["CanaryInstance"] for outputs in told]
        plain, far = self.host(REGIONS[0], 1), self.host(REGIONS[1], 2)
        stripped = self.host(REGIONS[1], 3, drums_installation=None, drums_deadline=None)
        disguised = self.host(REGIONS[0], 4, drums_role="canary")
        protected, stopped = self.host(REGIONS[0], 5), self.host(REGIONS[1], 6)
        self.control("POST", "edit", {"instance": protected, "disable_api_stop": True, "disable_api_termination": True})
        eu.stop_instances(InstanceIds=[stopped])
        by_hand = self.launch(us, TagSpecifications=[tagged("instance", OURS)])
        spared = [self.host(REGIONS[0], 7, THEIRS), self.launch(eu), *canaries]
        volumes = [
            self.client("ec2", region).create_volume(
                AvailabilityZone=f"{region}a", Size=1, TagSpecifications=[tagged("volume", whose)]
            )["VolumeId"]
            for region, whose in ((REGIONS[1], OURS), (REGIONS[0], THEIRS))
        ]
        ours = [plain, far, stripped, disguised, protected, stopped, by_hand]
        before = {i: self.state(i) for i in spared}

        lines = commands(RUNBOOK)
        verify = lines.index("test ! -s left")
        # What it is to find, it finds: before anything was done the question is answered with all of them.
        for line in lines[:6]:
            self.done(line, folder)
        self.assertEqual({line.split()[1] for line in (folder / "hosts").read_text().splitlines()}, set(ours))
        for line in lines[6 : verify + 1]:
            self.done(line, folder)
        self.assertEqual([self.state(i) for i in ours], ["terminated"] * len(ours))
        self.assertEqual({i: self.state(i) for i in spared}, before)
        left = {v["VolumeId"] for ec2 in (us, eu) for v in ec2.describe_volumes()["Volumes"]}
        self.assertEqual((volumes[0] in left, volumes[1] in left), (False, True))
        for line in lines[verify + 1 :]:
            self.done(line, folder)
        self.assertEqual(len((folder / "stacks").read_text().splitlines()), 2)
        for region in REGIONS:
            self.assertEqual(self.client("cloudformation", region).describe_stacks()["Stacks"], [])

    def test_a_region_that_does_not_answer_is_not_taken_for_empty(self):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        lines = commands(RUNBOOK)
        verify = lines.index("test ! -s left")
        (folder / "regions").write_text("us-east-1\nus-west-2\n")
        for line in lines[verify - 5 : verify]:
            self.done(line, folder)
        self.done(lines[verify], folder)
        self.fault(action="DescribeInstances", region="us-west-2", code="AuthFailure", status=401, count=None)
        for line in lines[verify - 5 : verify]:
            self.done(line, folder)
        self.assertEqual((folder / "left").read_text(), "us-west-2 NOT-SEEN\n")
        self.assertNotEqual(execute(lines[verify], folder, self.endpoint).returncode, 0)

    def done(self, command, folder):
        done = execute(command, folder, self.endpoint)
        self.assertEqual(done.returncode, 0, f"`{command}`: {done.stdout}{done.stderr}")


def tagged(kind, installation):
    return {"ResourceType": kind, "Tags": [{"Key": "drums:installation", "Value": installation}]}
