"""What each role may do, asked of the tests' AWS, which checks calls against the policies as they lie here."""

import json
import pathlib
import re
import unittest
import urllib.error
import urllib.request

import boto3
from botocore import xform_name
from botocore.exceptions import ClientError
from emulator.iam import Iam
from tests.peer import TYPE, PeerCase

HERE = pathlib.Path(__file__).resolve().parents[1]
OURS, THEIRS = "0a1b2c3d", "99999999"
ENDING = ("COORDINATOR", "SWEEPER", "SCHEDULE")
POLICIES = {"COORDINATOR": ["coordinator", "evidence"], "SWEEPER": "sweeper", "SCHEDULE": "schedule", "HOST": "host"}
NONE = "no profile"
# Who may edit tags can do any of these to a host.
EDITS = {
    "as launched": {},
    "no installation": {"drums:installation": None},
    "another installation": {"drums:installation": THEIRS},
    "called a canary": {"drums:role": "canary"},
    "no tags": {"drums:installation": None, "drums:deadline": None},
}


class Roles(PeerCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        peer = cls()
        for profile in (f"drums-host-{OURS}", f"drums-host-{THEIRS}", "administrator"):
            peer.control("POST", "role", {"profile": profile})
        tags = {"drums:installation": OURS}
        peer.control("POST", "principals", {key: {"policy": policy, "tags": tags} for key, policy in POLICIES.items()})

    def ec2(self, key="TEST"):
        return self.client("ec2", key_id=key)

    def host(self, installation=OURS, key="TEST", profile=None, volume=None, tags=None, **more):
        """A host as it is launched, by somebody who may, if nothing else is said. Tags that are None are left out."""
        whole = {"drums:installation": installation, "drums:deadline": "2000-01-01T00:00:00Z"} | (tags or {})
        specs = []
        for kind, of_kind in (("instance", whole), ("volume", whole | (volume or {}))):
            pairs = [{"Key": name, "Value": value} for name, value in of_kind.items() if value is not None]
            specs.append({"ResourceType": kind, "Tags": pairs})
        asked = {"MetadataOptions": {"HttpTokens": "required"}, "TagSpecifications": specs}
        if profile != NONE:
            asked["IamInstanceProfile"] = {"Name": profile or f"drums-host-{installation}"}
        image = self.image(self.ec2())
        asked = {"ImageId": image, "InstanceType": TYPE, "MinCount": 1, "MaxCount": 1} | asked | more
        return self.ec2(key).run_instances(**asked)["Instances"][0]["InstanceId"]

    def by_hand(self, **tags):
        """An instance with our tag and without our profile."""
        pairs = [{"Key": k, "Value": v} for k, v in ({"drums:installation": OURS} | tags).items()]
        return self.launch(self.ec2(), TagSpecifications=[{"ResourceType": "instance", "Tags": pairs}])

    def edit(self, id_, **what):
        self.control("POST", "edit", {"instance": id_} | what)

    def refused(self, action, call, *args, **asked):
        """That the call is refused for want of this action, and not by the way."""
        with self.assertRaisesRegex(ClientError, f"UnauthorizedOperation.* may not {action} on"):
            call(*args, **asked)

    def test_a_host_is_launched_with_its_own_profile_and_with_no_other(self):
        arn = "arn:aws:iam::123456789012:instance-profile/"
        self.assertEqual(self.state(self.host(key="COORDINATOR")), "running")
        by_arn = self.host(key="COORDINATOR", IamInstanceProfile={"Arn": f"{arn}drums-host-{OURS}"})
        self.assertEqual(self.state(by_arn), "running")
        run = "ec2:RunInstances"
        for profile in (NONE, f"drums-host-{THEIRS}", "administrator"):
            self.refused(run, self.host, key="COORDINATOR", profile=profile)
        self.refused(run, self.host, key="COORDINATOR", IamInstanceProfile={"Arn": arn + "administrator"})
        # What else a launch must have.
        canary = {"drums:role": "canary"}
        for tags in ({"drums:installation": THEIRS}, {"drums:installation": None}, {"drums:deadline": None}, canary):
            whole = {"drums:installation": OURS, "drums:role": None}
            self.refused(run, self.host, key="COORDINATOR", tags=tags, volume=whole)
        for volume in ({"drums:installation": THEIRS}, {"drums:installation": None}):
            self.refused(run, self.host, key="COORDINATOR", volume=volume)
        self.refused(run, self.host, key="COORDINATOR", MetadataOptions={"HttpTokens": "optional"})
        for key in ("SWEEPER", "SCHEDULE", "HOST"):
            self.refused(run, self.host, key=key)

    def test_whoever_edits_tags_takes_neither_end_nor_protection_from_the_roles(self):
        for key in ENDING:
            for name, tags in EDITS.items():
                with self.subTest(name, role=key):
                    id_ = self.host()
                    self.edit(id_, tags=tags)
                    ec2 = self.ec2(key)
                    if key != "SCHEDULE":
                        self.edit(id_, disable_api_stop=True, disable_api_termination=True)
                        for protection in ("DisableApiTermination", "DisableApiStop"):
                            ec2.modify_instance_attribute(InstanceId=id_, **{protection: {"Value": False}})
                    ec2.terminate_instances(InstanceIds=[id_])
                    self.assertEqual(self.state(id_), "terminated")

    def test_a_host_of_another_installation_is_reached_by_no_edit_of_its_tags(self):
        id_ = self.host(THEIRS)
        for tags in ({}, {"drums:installation": OURS}, {"drums:installation": None}):
            self.edit(id_, tags=tags)
            self.reached_by_nobody(id_)

    def test_an_instance_of_nobody_is_reached_by_no_role(self):
        foreign = self.host(profile="administrator", tags={"drums:installation": None})
        for id_ in (self.launch(self.ec2()), self.by_hand(**{"drums:installation": THEIRS}), foreign):
            self.reached_by_nobody(id_)

    def reached_by_nobody(self, id_):
        for key in ENDING:
            with self.subTest(role=key):
                ec2 = self.ec2(key)
                self.refused("ec2:TerminateInstances", ec2.terminate_instances, InstanceIds=[id_])
                off = {"Value": False}
                self.refused("ec2:ModifyInstanceAttribute", ec2.modify_instance_attribute, InstanceId=id_, DisableApiStop=off)
        self.assertEqual(self.state(id_), "running")

    def test_what_was_launched_by_hand_is_reached_by_its_tag(self):
        for key in ENDING:
            id_ = self.by_hand()
            if key != "SCHEDULE":
                self.edit(id_, disable_api_stop=True)
                self.ec2(key).modify_instance_attribute(InstanceId=id_, DisableApiStop={"Value": False})
            self.ec2(key).terminate_instances(InstanceIds=[id_])
            self.assertEqual(self.state(id_), "terminated", key)

    def test_the_canary_is_ended_by_no_role_that_works_alone(self):
        canary = self.by_hand(**{"drums:role": "canary"})
        for key in ENDING:
            ec2 = self.ec2(key)
            if key != "COORDINATOR":
                self.refused("ec2:TerminateInstances", ec2.terminate_instances, InstanceIds=[canary])
            off = {"Value": False}
            self.refused("ec2:ModifyInstanceAttribute", ec2.modify_instance_attribute, InstanceId=canary, DisableApiStop=off)
        note = {"Resources": [canary], "Tags": [{"Key": "drums:swept", "Value": "2026-11-30T00:00:00Z"}]}
        self.ec2("SWEEPER").create_tags(**note)
        for tags in ([{"Key": "drums:installation", "Value": THEIRS}], note["Tags"] + [{"Key": "drums:role", "Value": "x"}]):
            self.refused("ec2:CreateTags", self.ec2("SWEEPER").create_tags, Resources=[canary], Tags=tags)
        theirs = self.by_hand(**{"drums:role": "canary", "drums:installation": THEIRS})
        for other in (self.host(), theirs):
            self.refused("ec2:CreateTags", self.ec2("SWEEPER").create_tags, **(note | {"Resources": [other]}))
        # The coordinator asks by a dry run whether it may end, and has nothing else to ask it of.
        with self.assertRaisesRegex(ClientError, "DryRunOperation"):
            self.ec2("COORDINATOR").terminate_instances(InstanceIds=[canary], DryRun=True)

    def test_no_role_makes_a_host_live_longer(self):
        host, by_hand = self.host(), self.by_hand()
        associations = self.ec2().describe_iam_instance_profile_associations()["IamInstanceProfileAssociations"]
        (association,) = [a["AssociationId"] for a in associations if a["InstanceId"] == host]
        later = [{"Key": "drums:deadline", "Value": "2999-01-01T00:00:00Z"}]
        edits = (
            {"DisableApiTermination": {"Value": True}},
            {"DisableApiStop": {"Value": True}},
            {"Attribute": "disableApiStop", "Value": "true"},
            {"InstanceInitiatedShutdownBehavior": {"Value": "stop"}},
            {"UserData": {"Value": b"#!/bin/sh"}},
        )
        for key in (*ENDING, "HOST"):
            ec2 = self.ec2(key)
            for id_ in (host, by_hand):
                for edit in edits:
                    with self.subTest(role=key, edit=edit):
                        self.refused("ec2:ModifyInstanceAttribute", ec2.modify_instance_attribute, InstanceId=id_, **edit)
                self.refused("ec2:StopInstances", ec2.stop_instances, InstanceIds=[id_])
                self.refused("ec2:CreateTags", ec2.create_tags, Resources=[id_], Tags=later)
                self.refused("ec2:DeleteTags", ec2.delete_tags, Resources=[id_], Tags=[{"Key": "drums:installation"}])
            call = ec2.disassociate_iam_instance_profile
            self.refused("ec2:DisassociateIamInstanceProfile", call, AssociationId=association)

    def test_a_role_is_handed_to_its_own_service_alone(self):
        iam = Iam(HERE / "policies")
        caller = {"policy": "coordinator", "tags": {"drums:installation": OURS}}
        services = ("ec2", "scheduler", "lambda")
        handed = set()
        for role in ("host", "schedule", "sweeper", "sweep", "coordinator"):
            for named in (f"{role}-{OURS}", f"{role}-{THEIRS}"):
                for service in services:
                    context = {"iam:PassedToService": f"{service}.amazonaws.com"}
                    if iam.allows(caller, "iam:PassRole", f"arn:aws:iam::123456789012:role/drums-{named}", context):
                        handed.add((named, service))
        self.assertEqual(handed, {(f"host-{OURS}", "ec2"), (f"schedule-{OURS}", "scheduler")})


class Evidence(PeerCase):
    BUCKET = f"drums-{OURS}-123456789012"

    def setUp(self):
        super().setUp()
        self.client("s3").create_bucket(Bucket=self.BUCKET)
        tags = {"drums:installation": OURS}
        for key, policy in POLICIES.items():
            self.control("POST", "principals", {key: {"policy": policy, "tags": tags}})
        self.s3 = self.client("s3", key_id="COORDINATOR")

    def refused(self, call, **asked):
        with self.assertRaises(ClientError) as raised:
            call(**asked)
        self.assertEqual(raised.exception.response["ResponseMetadata"]["HTTPStatusCode"], 403, raised.exception)

    def put(self, key, **more):
        return self.s3.put_object(Bucket=self.BUCKET, Key=key, Body=b"evidence", **more)

    def test_evidence_is_written_once_read_and_never_deleted(self):
        key = f"{OURS}/runs/1/h1/00000.segment"
        self.put(key, IfNoneMatch="*")
        with self.assertRaisesRegex(ClientError, "PreconditionFailed"):
            self.put(key, IfNoneMatch="*")
        for without in ({}, {"IfMatch": self.s3.head_object(Bucket=self.BUCKET, Key=key)["ETag"]}):
            self.refused(self.put, key=key, **without)
        self.assertEqual(self.s3.get_object(Bucket=self.BUCKET, Key=key)["Body"].read(), b"evidence")
        self.assertEqual(len(self.s3.list_objects_v2(Bucket=self.BUCKET, Prefix=key)["Contents"]), 1)
        self.refused(self.s3.delete_object, Bucket=self.BUCKET, Key=key)
        self.refused(self.s3.delete_object, Bucket=self.BUCKET, Key=key, VersionId="null")
        self.refused(self.s3.copy_object, Bucket=self.BUCKET, Key=key, CopySource={"Bucket": self.BUCKET, "Key": key})
        self.refused(self.s3.create_multipart_upload, Bucket=self.BUCKET, Key=key)
        self.refused(self.s3.put_bucket_policy, Bucket=self.BUCKET, Policy="{}")

    def test_nothing_is_written_beside_the_installation_s_keys_nor_reached_in_another_bucket(self):
        theirs = f"drums-{THEIRS}-123456789012"
        self.client("s3").create_bucket(Bucket=theirs)
        for bucket, key in ((self.BUCKET, f"{THEIRS}/a"), (self.BUCKET, "a"), (theirs, f"{OURS}/a"), (theirs, "artifacts/a")):
            self.client("s3").put_object(Bucket=bucket, Key=key, Body=b"x")
            self.refused(self.s3.put_object, Bucket=bucket, Key=key + "b", Body=b"x", IfNoneMatch="*")
            # Whoever verifies reads all that is in the bucket.
            if bucket == theirs:
                self.refused(self.s3.get_object, Bucket=bucket, Key=key)
            else:
                self.s3.get_object(Bucket=bucket, Key=key)
        self.refused(self.s3.list_objects_v2, Bucket=theirs)

    def test_artifacts_are_uploaded_in_parts_which_can_be_given_up(self):
        key = "artifacts/" + "5" * 64
        for whole in (True, False):
            begun = {"Bucket": self.BUCKET, "Key": key}
            begun["UploadId"] = self.s3.create_multipart_upload(**begun)["UploadId"]
            part = self.s3.upload_part(**begun, PartNumber=1, Body=b"x")["ETag"]
            if whole:
                parts = {"Parts": [{"PartNumber": 1, "ETag": part}]}
                self.s3.complete_multipart_upload(**begun, MultipartUpload=parts)
            else:
                self.s3.abort_multipart_upload(**begun)
        self.assertEqual(self.s3.head_object(Bucket=self.BUCKET, Key=key)["ContentLength"], 1)
        self.refused(self.s3.delete_object, Bucket=self.BUCKET, Key=key)

    def test_a_host_has_the_places_that_it_was_given_and_nothing_by_its_own_role(self):
        host = self.client("s3", key_id="HOST")
        key = f"{OURS}/runs/1/h2/00000.segment"
        for call in (host.get_object, host.put_object, host.delete_object):
            self.refused(call, Bucket=self.BUCKET, Key=key)
        self.refused(host.list_objects_v2, Bucket=self.BUCKET)
        asked = {"Bucket": self.BUCKET, "Key": key, "IfNoneMatch": "*"}
        place = self.client("s3", key_id="COORDINATOR", signature_version="s3v4").generate_presigned_url("put_object", asked)
        self.assertIn("if-none-match", place, "what is signed must be sent")

        def put(**headers):
            request = urllib.request.Request(place, b"evidence", headers, method="PUT")
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status

        for headers, status in (({}, 403), ({"If-None-Match": "*"}, 200), ({"If-None-Match": "*"}, 412)):
            try:
                self.assertEqual(put(**headers), status)
            except urllib.error.HTTPError as error:
                error.close()
                self.assertEqual(error.code, status)

    def test_all_that_is_granted_is_used(self):
        self.put(f"{OURS}/installation.json", IfNoneMatch="*")
        self.test_artifacts_are_uploaded_in_parts_which_can_be_given_up()
        self.s3.list_objects_v2(Bucket=self.BUCKET)
        self.assertEqual(self.control("GET", "grants")["evidence"]["unused"], [])


class Calls(unittest.TestCase):
    """The calls that infra/ec2 makes, as its source names them."""

    SERVICES = {"ec2": "ec2", "ssm": "ssm", "scheduler": "scheduler", "pricing": "pricing", "service-quotas": "servicequotas"}
    # Asked of IAM beside a call that names it: tags in the launch, roles that are handed on.
    BESIDE = {"ec2:CreateTags", "iam:PassRole"}

    @staticmethod
    def granted(*policies):
        found = set()
        for policy in policies:
            for statement in json.loads((HERE / "policies" / f"{policy}.json").read_text())["Statement"]:
                if statement["Effect"] == "Allow":
                    actions = statement["Action"]
                    found |= set(actions if isinstance(actions, list) else [actions])
        return found

    def test_each_call_that_is_made_is_granted_and_each_that_is_granted_is_made(self):
        operations = {}
        for name, prefix in self.SERVICES.items():
            model = boto3.client(name, region_name="us-east-1").meta.service_model
            operations |= {xform_name(operation): f"{prefix}:{operation}" for operation in model.operation_names}
        # A call's builder is begun without arguments: `.describe_images()`.
        source = "".join(path.read_text() for path in sorted((HERE.parent / "ec2/src").glob("*.rs")))
        made = {operations[name] for name in re.findall(r"\.([a-z_]+)\(\)", source) if name in operations}
        self.assertIn("ec2:RunInstances", made)
        coordinator, sweeper = self.granted("coordinator"), self.granted("sweeper")
        self.assertEqual(made - coordinator - sweeper, set(), "made and granted to nobody")
        self.assertEqual(coordinator - made - self.BESIDE, set(), "granted to the coordinator and never made")
