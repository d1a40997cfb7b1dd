import datetime

import sweeper
from tests.peer import PeerCase

OURS, THEIRS = "0a1b2c3d", "99999999"
LONGEST = datetime.timedelta(hours=24)


class Sweeper(PeerCase):
    def setUp(self):
        super().setUp()
        for entry in self.control("GET", "instances"):
            if entry["state"] != "terminated":
                ec2 = self.client("ec2", entry["region"])
                ec2.modify_instance_attribute(InstanceId=entry["id"], DisableApiTermination={"Value": False})
                ec2.terminate_instances(InstanceIds=[entry["id"]])
        self.ec2 = self.client("ec2")
        tags = {"drums:installation": OURS, "drums:role": "canary", "drums:deadline": "2000-01-01T00:00:00Z"}
        self.canary = self.tagged(tags)
        self.ec2.stop_instances(InstanceIds=[self.canary])
        self.control("POST", "principals", {"SWEEPER": {"policy": "sweeper", "tags": {"drums:installation": OURS}}})

    def at(self, in_s):
        return datetime.datetime.fromtimestamp(self.now() + in_s, datetime.UTC)

    def tagged(self, tags, ec2=None, **more):
        pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
        return self.launch(ec2 or self.ec2, TagSpecifications=[{"ResourceType": "instance", "Tags": pairs}], **more)

    def host(self, in_s, number=1, installation=OURS, ec2=None, **tags):
        """A host as it is launched; `tags` are edits of its tags."""
        due = self.at(in_s)
        token = f"drums1-{installation}-{int(due.timestamp()):010x}-{number:016x}-0001"
        all_tags = {"drums:installation": installation, "drums:deadline": f"{due:%Y-%m-%dT%H:%M:%SZ}"}
        all_tags |= {key.replace("_", ":"): value for key, value in tags.items()}
        return self.tagged({k: v for k, v in all_tags.items() if v}, ec2, ClientToken=token)

    def sweep(self, shadow=False, canary=None):
        return sweeper.sweep(
            lambda region: self.client("ec2", region, key_id="SWEEPER"),
            OURS,
            ["us-east-1", canary or self.canary],
            LONGEST,
            shadow,
            self.at(0),
        )

    def test_it_ends_what_is_overdue_and_spares_the_rest(self):
        eu = self.client("ec2", "eu-central-1")
        overdue, elsewhere = self.host(-1), self.host(-1, 2, ec2=eu)
        early, theirs = self.host(3600, 3), self.host(-1, 4, THEIRS)
        foreign, adopted = self.launch(self.ec2), self.tagged({"drums:host": "h1"})
        self.assertEqual(len(self.sweep()), 2)
        states = {id_: self.state(id_) for id_ in (overdue, elsewhere, early, theirs, foreign, adopted, self.canary)}
        self.assertEqual(
            list(states.values()),
            ["terminated", "terminated", "running", "running", "running", "running", "stopped"],
        )
        tags = {t["Key"]: t["Value"] for t in self.ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [self.canary]}])["Tags"]}
        self.assertEqual(tags["drums:swept"], f"{self.at(0):%Y-%m-%dT%H:%M:%SZ}")

    def test_an_edited_tag_shortens_and_never_extends(self):
        edited = {
            "extended": self.host(-1, 11, drums_deadline="2999-01-01T00:00:00Z"),
            "unreadable": self.host(-1, 12, drums_deadline="never"),
            "without a zone": self.host(-1, 16, drums_deadline="2999-01-01T00:00:00"),
            "a date": self.host(-1, 17, drums_deadline="2999-01-01"),
            "removed": self.host(-1, 13, drums_deadline=None),
            "given away": self.host(-1, 14, drums_deadline="2999-01-01T00:00:00Z", drums_role="canary"),
            "shortened": self.host(3600, 15, drums_deadline="2001-01-01T00:00:00Z"),
        }
        with self.assertRaisesRegex(RuntimeError, edited["given away"]):
            self.sweep()
        states = {name: self.state(id_) for name, id_ in edited.items()}
        # Only the permission spares what was made to look like a canary, and loudly; its other layers end it.
        self.assertEqual(states.pop("given away"), "running")
        self.assertEqual(set(states.values()), {"terminated"})

    def test_without_a_token_the_tag_counts_within_the_longest_life(self):
        tags = {"drums:installation": OURS}
        by_tag = self.tagged(tags | {"drums:deadline": "2001-01-01T00:00:00Z"})
        untold = self.tagged(tags)
        endless = self.tagged(tags | {"drums:deadline": "2999-01-01T00:00:00Z"})
        self.sweep()
        self.assertEqual([self.state(i) for i in (by_tag, untold, endless)], ["terminated", "terminated", "running"])
        self.advance(LONGEST.total_seconds())
        self.sweep()
        self.assertEqual(self.state(endless), "terminated")

    def test_it_looks_beyond_the_first_page(self):
        hosts = [self.host(-1, 100 + n) for n in range(120)]
        self.assertEqual(len(self.sweep()), len(hosts))

    def test_a_missing_canary_a_blind_region_and_one_that_resists_are_failures_that_spare_nothing(self):
        overdue = self.host(-1, 21)
        with self.assertRaisesRegex(RuntimeError, "canary"):
            self.sweep(canary="i-0123456789abcdef0")
        self.assertEqual(self.state(overdue), "terminated")
        overdue = self.host(-1, 22)
        self.fault(action="DescribeInstances", region="eu-central-1", code="InternalError", status=500, count=None)
        with self.assertRaisesRegex(RuntimeError, "eu-central-1"):
            self.sweep()
        self.assertEqual(self.state(overdue), "terminated")
        self.control("DELETE", "faults")
        resists, overdue = self.host(-1, 23), self.host(-1, 24)
        self.fault(action="TerminateInstances", where={"InstanceId.1": resists}, code="InternalError", status=500)
        with self.assertRaisesRegex(RuntimeError, resists):
            self.sweep()
        self.assertEqual((self.state(resists), self.state(overdue)), ("running", "terminated"))
        self.sweep()
        self.assertEqual(self.state(resists), "terminated", "the next sweep ends it")

    def test_a_token_that_is_no_instant_ends_no_sweep(self):
        token = f"drums1-{OURS}-{'f' * 10}-{9:016x}-0001"
        never = self.tagged({"drums:installation": OURS}, ClientToken=token)
        overdue = self.host(-1, 25)
        with self.assertRaisesRegex(RuntimeError, never):
            self.sweep()
        self.assertEqual(self.state(overdue), "terminated")

    def swept(self):
        tags = self.ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [self.canary]}])["Tags"]
        return [t["Value"] for t in tags if t["Key"] == "drums:swept"]

    def test_launches_are_told_of_a_sweep_that_ends_and_of_no_other(self):
        resists = self.host(-1, 26)
        self.sweep(shadow=True)
        self.assertEqual(self.swept(), [], "a shadow")
        self.fault(action="TerminateInstances", where={"InstanceId.1": resists}, code="InternalError", status=500)
        with self.assertRaisesRegex(RuntimeError, resists):
            self.sweep()
        self.assertEqual(self.swept(), [], "one that failed")
        self.sweep()
        self.assertEqual(self.swept(), [f"{self.at(0):%Y-%m-%dT%H:%M:%SZ}"])

    def test_protection_is_switched_off_and_each_call_names_one(self):
        hosts = [self.host(-1, 31), self.host(-1, 32)]
        self.ec2.modify_instance_attribute(InstanceId=hosts[0], DisableApiTermination={"Value": True})
        since = len(self.control("GET", "journal"))
        self.sweep()
        self.assertEqual([self.state(i) for i in hosts], ["terminated"] * 2)
        ends = [e for e in self.control("GET", f"journal?since={since}") if e.get("action") == "TerminateInstances"]
        self.assertEqual({sum(k.startswith("InstanceId") for k in e["params"]) for e in ends}, {1})

    def test_a_shadow_ends_nothing(self):
        overdue = self.host(-1, 41)
        self.assertEqual(len(self.sweep(shadow=True)), 1)
        self.assertEqual(self.state(overdue), "running")

    def test_all_that_its_policy_grants_is_used(self):
        iam, name = self.client("iam"), f"drums-host-{OURS}"
        trust = '{"Version": "2012-10-17", "Statement": []}'
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust)
        iam.create_instance_profile(InstanceProfileName=name)
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        due = int(self.at(-1).timestamp())
        stripped = self.launch(
            self.ec2, IamInstanceProfile={"Name": name}, ClientToken=f"drums1-{OURS}-{due:010x}-{51:016x}-0001"
        )
        protected = self.host(-1, 52)
        self.ec2.modify_instance_attribute(InstanceId=protected, DisableApiTermination={"Value": True})
        self.sweep()
        self.assertEqual([self.state(i) for i in (stripped, protected)], ["terminated"] * 2)
        self.assertEqual(self.control("GET", "grants")["sweeper"]["unused"], [])
