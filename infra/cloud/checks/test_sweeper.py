import contextlib
import datetime
import io
import os
import threading
from unittest import mock

import assemble
import sweeper
from tests.peer import PeerCase

OURS, THEIRS = "0a1b2c3d", "99999999"
LONGEST = datetime.timedelta(hours=24)
HOME, ELSEWHERE = "us-east-1", "eu-central-1"
PROFILE = f"drums-host-{OURS}"


class Sweeper(PeerCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for name in (PROFILE, f"drums-host-{THEIRS}"):
            cls().control("POST", "role", {"profile": name})

    def setUp(self):
        super().setUp()
        for entry in self.control("GET", "instances"):
            if entry["state"] != "terminated":
                off = {"disable_api_stop": False, "disable_api_termination": False}
                self.control("POST", "edit", {"instance": entry["id"]} | off)
                self.client("ec2", entry["region"]).terminate_instances(InstanceIds=[entry["id"]])
        # What was ended is shown for an hour, and would fill pages.
        self.advance(3600)
        self.ec2, self.eu = self.client("ec2", HOME), self.client("ec2", ELSEWHERE)
        self.canary = self.a_canary(self.ec2)
        self.control("POST", "principals", {"SWEEPER": {"policy": "sweeper", "tags": {"drums:installation": OURS}}})

    def a_canary(self, ec2, stopped=True):
        tags = {"drums:installation": OURS, "drums:role": "canary", "drums:deadline": "2000-01-01T00:00:00Z"}
        canary = self.tagged(tags, ec2)
        if stopped:
            ec2.stop_instances(InstanceIds=[canary])
        return canary

    def at(self, in_s):
        return datetime.datetime.fromtimestamp(self.now() + in_s, datetime.UTC)

    def tagged(self, tags, ec2=None, **more):
        pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
        if pairs:
            more["TagSpecifications"] = [{"ResourceType": "instance", "Tags": pairs}]
        return self.launch(ec2 or self.ec2, **more)

    def host(self, in_s, number=1, installation=OURS, ec2=None, **tags):
        """A host as it is launched; `tags` are edits of its tags."""
        due = self.at(in_s)
        token = f"drums1-{installation}-{int(due.timestamp()):010x}-{number:016x}-0001"
        all_tags = {"drums:installation": installation, "drums:deadline": f"{due:%Y-%m-%dT%H:%M:%SZ}"}
        all_tags |= {key.replace("_", ":"): value for key, value in tags.items()}
        profile = {"Name": f"drums-host-{installation}"}
        return self.tagged({k: v for k, v in all_tags.items() if v}, ec2, ClientToken=token, IamInstanceProfile=profile)

    def sweep(self, shadow=False, canaries=None, only=(), client=None):
        client = client or (lambda region: self.client("ec2", region, key_id="SWEEPER"))
        canaries = {(HOME, self.canary)} if canaries is None else canaries
        return sweeper.Sweep(client, OURS, canaries, LONGEST, shadow, self.at(0)).run(only)

    def test_it_ends_what_is_overdue_and_spares_the_rest(self):
        overdue, elsewhere = self.host(-1), self.host(-1, 2, ec2=self.eu)
        early, theirs = self.host(3600, 3), self.host(-1, 4, THEIRS)
        foreign, adopted = self.launch(self.ec2), self.tagged({"drums:host": "h1"})
        self.assertEqual(len(self.sweep()), 2)
        states = {id_: self.state(id_) for id_ in (overdue, elsewhere, early, theirs, foreign, adopted, self.canary)}
        self.assertEqual(
            list(states.values()),
            ["terminated", "terminated", "running", "running", "running", "running", "stopped"],
        )
        self.assertEqual(self.swept(), [f"{self.at(0):%Y-%m-%dT%H:%M:%SZ}"])

    def test_an_edited_tag_shortens_and_never_extends(self):
        edited = {
            "extended": self.host(-1, 11, drums_deadline="2999-01-01T00:00:00Z"),
            "unreadable": self.host(-1, 12, drums_deadline="never"),
            "without a zone": self.host(-1, 16, drums_deadline="2999-01-01T00:00:00"),
            "a date": self.host(-1, 17, drums_deadline="2999-01-01"),
            "removed": self.host(-1, 13, drums_deadline=None),
            "all removed": self.host(-1, 18, drums_deadline=None, drums_installation=None),
            "given away": self.host(-1, 14, drums_deadline="2999-01-01T00:00:00Z", drums_role="canary"),
            "shortened": self.host(3600, 15, drums_deadline="2001-01-01T00:00:00Z"),
        }
        self.sweep()
        states = {name: self.state(id_) for name, id_ in edited.items()}
        self.assertEqual(set(states.values()), {"terminated"}, states)

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
            self.sweep(canaries={(HOME, "i-0123456789abcdef0")})
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

    def test_each_region_has_a_canary_and_each_must_be_found(self):
        both = {(HOME, self.canary), (ELSEWHERE, self.a_canary(self.eu))}
        self.assertEqual(self.sweep(canaries=both), [])
        for region, canary in both:
            (seen,) = [i for i in self.control("GET", "instances") if i["id"] == canary]
            self.assertEqual((seen["state"], seen["tags"]["drums:swept"]), ("stopped", f"{self.at(0):%Y-%m-%dT%H:%M:%SZ}"))
        self.advance(60)
        with self.assertRaisesRegex(RuntimeError, "no canary.*i-0123456789abcdef0"):
            self.sweep(canaries=both | {(ELSEWHERE, "i-0123456789abcdef0")})
        self.assertNotIn(f"{self.at(0):%Y-%m-%dT%H:%M:%SZ}", self.swept(), "launches are not told of it")

    def test_a_canary_that_nobody_named_breaks_no_sweep_and_is_told(self):
        unknown, overdue = self.a_canary(self.eu), self.host(-1)
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            self.assertEqual(len(self.sweep()), 1)
        self.assertIn(f"{unknown} looks like a canary", told.getvalue())
        self.assertEqual((self.state(unknown), self.state(overdue)), ("stopped", "terminated"))
        # What runs is no canary, whatever it is called.
        running = self.a_canary(self.eu, stopped=False)
        with self.assertRaisesRegex(RuntimeError, running):
            self.sweep()

    def test_the_scope_is_what_was_asked_for_and_where_the_canaries_are(self):
        west = self.client("ec2", "us-west-2")
        hosts = [self.host(-1, n, ec2=ec2) for n, ec2 in enumerate((self.ec2, self.eu, west), 60)]
        self.sweep(only=["us-west-2"])
        self.assertEqual([self.state(i) for i in hosts], ["terminated", "running", "terminated"])
        self.sweep()
        self.assertEqual(self.state(hosts[1]), "terminated")

    def test_regions_are_asked_at_once(self):
        # Each region's first call waits for all three: one after the other, nobody would come.
        together = threading.Barrier(3, timeout=20)

        class Client:
            def __init__(self, real):
                self.real = real

            def __getattr__(self, name):
                return getattr(self.real, name)

            def get_paginator(self, name):
                together.wait()
                return self.real.get_paginator(name)

        overdue = self.host(-1, ec2=self.eu)
        self.sweep(client=lambda region: Client(self.client("ec2", region, key_id="SWEEPER")))
        self.assertEqual(self.state(overdue), "terminated")

    def test_a_region_that_does_not_answer_holds_up_no_other(self):
        overdue = self.host(-1)
        self.fault(action="DescribeInstances", region=ELSEWHERE, delay_s=5)
        late = f"{ELSEWHERE}: not done in 2 s"
        with mock.patch.object(sweeper, "PATIENCE_S", 2), self.assertRaisesRegex(RuntimeError, late):
            self.sweep()
        self.assertEqual((self.state(overdue), self.swept()), ("terminated", []))

    def list_fails(self, name, skip=0):
        fault = {"action": "DescribeInstances", "region": HOME, "where": {"Filter.1.Name": name}, "skip": skip}
        self.fault(**fault, code="InternalError", status=500)

    def test_what_was_seen_before_a_call_failed_is_ended(self):
        tagged, stripped = self.host(-1, 71), self.host(-1, 72, drums_installation=None, drums_deadline=None)
        self.list_fails("client-token")
        with self.assertRaisesRegex(RuntimeError, "InternalError"):
            self.sweep()
        self.assertEqual((self.state(tagged), self.state(stripped)), ("terminated", "running"))
        by_hand = self.tagged({"drums:installation": OURS})
        self.list_fails("tag:drums:installation")
        with self.assertRaisesRegex(RuntimeError, "InternalError"):
            self.sweep()
        self.assertEqual((self.state(by_hand), self.state(stripped)), ("running", "terminated"))

    def test_what_is_on_the_pages_before_one_that_failed_is_ended(self):
        hosts = [self.host(-1, 400 + n) for n in range(120)]
        for name in ("client-token", "tag:drums:installation"):
            self.list_fails(name, skip=1)
        with self.assertRaisesRegex(RuntimeError, "InternalError"):
            self.sweep()
        left = [i for i in hosts if self.state(i) == "running"]
        self.assertTrue(0 < len(left) < len(hosts), len(left))
        self.sweep()
        self.assertEqual({self.state(i) for i in hosts}, {"terminated"})

    def test_where_regions_are_not_known_those_of_the_canaries_are_swept(self):
        overdue, elsewhere = self.host(-1, 81), self.host(-1, 82, ec2=self.eu)
        self.fault(action="DescribeRegions", region=HOME, code="InternalError", status=500, count=None)
        with self.assertRaisesRegex(RuntimeError, "which regions there are"):
            self.sweep()
        self.assertEqual((self.state(overdue), self.state(elsewhere)), ("terminated", "running"))
        # Another canary's region knows them, too.
        self.sweep(canaries={(HOME, self.canary), ("us-west-2", self.a_canary(self.client("ec2", "us-west-2")))})
        self.assertEqual(self.state(elsewhere), "terminated")

    def test_one_edited_tag_and_either_protection_disarm_nothing(self):
        edits = {"drums:installation": None}, {"drums:installation": THEIRS}, {"drums:role": "canary"}
        hosts = [self.host(-1, 90 + n) for n in range(6)]
        for n, id_ in enumerate(hosts):
            protection = ("disable_api_stop", "disable_api_termination")[n % 2]
            self.control("POST", "edit", {"instance": id_, "tags": edits[n // 2], protection: True})
        self.sweep()
        self.assertEqual([self.state(i) for i in hosts], ["terminated"] * 6)

    def test_two_installations_spare_each_other_whatever_tags_say(self):
        theirs = self.host(-1, 1, THEIRS)
        self.control("POST", "edit", {"instance": theirs, "tags": {"drums:installation": OURS}})
        self.assertEqual(self.sweep(), [])
        self.assertEqual(self.state(theirs), "running")

    def test_the_handler_reads_what_the_stack_gives_it(self):
        overdue, elsewhere = self.host(-86400 * 365, 1), self.host(-86400 * 365, 2, ec2=self.eu)
        function = assemble.assembled("stack")["Resources"]["Sweeper"]["Properties"]
        values = {"Installation": OURS, "AWS::Region": HOME, "Canary": self.canary, "LongestLifeHours": "24", "Shadow": "no"}
        values |= {"OtherCanaries": "", "Regions": f"{HOME}"}

        def filled(value):
            if "Ref" in value:
                return values[value["Ref"]]
            text = value["Fn::Sub"]
            for name, known in values.items():
                text = text.replace(f"${{{name}}}", known)
            return text

        env = {key: filled(value) for key, value in function["Environment"]["Variables"].items()}
        env |= {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": "SWEEPER", "AWS_SECRET_ACCESS_KEY": "secret"}
        with mock.patch.dict(os.environ, env):
            sweeper.client.cache_clear()
            self.assertEqual(len(sweeper.handler({}, None)), 1)
            other = self.a_canary(self.eu)
            values |= {"OtherCanaries": f"{ELSEWHERE} {other}"}
            os.environ["CANARIES"] = filled(function["Environment"]["Variables"]["CANARIES"])
            self.assertEqual(len(sweeper.handler({}, None)), 1, "its region is in scope")
        self.assertEqual([self.state(i) for i in (overdue, elsewhere)], ["terminated"] * 2)

    def test_all_that_its_policy_grants_is_used(self):
        tags = {"drums:installation": OURS, "drums:deadline": "2001-01-01T00:00:00Z"}
        hosts = [self.host(-1, 51), self.tagged(tags)]
        for id_ in hosts:
            self.control("POST", "edit", {"instance": id_, "disable_api_stop": True})
        self.sweep()
        self.assertEqual([self.state(i) for i in hosts], ["terminated"] * 2)
        self.assertEqual(self.control("GET", "grants")["sweeper"]["unused"], [])
