import ast
import json
import pathlib
import subprocess
import sys
import unittest

import assemble
from tests.peer import PeerCase

HERE = pathlib.Path(__file__).resolve().parents[1]
POLICIES = {path.stem: json.loads(path.read_text()) for path in (HERE / "policies").glob("*.json")}
INSTALLATION = "0a1b2c3d"


def listed(value):
    return value if isinstance(value, list) else [value]


class Files(unittest.TestCase):
    def test_the_stack_is_put_together_from_its_files_as_they_are(self):
        here = (HERE / "stack.json").read_text()
        self.assertEqual(here, assemble.text(), "run: python assemble.py > stack.json")
        self.assertLess(len(here), 51_200, "what CloudFormation takes without a bucket")

    def test_the_sweeper_fits_into_the_stack(self):
        self.assertLessEqual(len((HERE / "sweeper.py").read_text()), 4096)

    def test_the_stack_passes_cfn_lint(self):
        lint = pathlib.Path(sys.executable).with_name("cfn-lint")
        done = subprocess.run([lint, "--include-checks", "W", "--", HERE / "stack.json"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_nothing_is_granted_by_a_wildcard_or_to_all(self):
        for name, document in POLICIES.items():
            for statement in document["Statement"]:
                where = f"{name}, {statement['Sid']}"
                if statement["Effect"] == "Deny":
                    continue
                reads = True
                for action in listed(statement["Action"]):
                    self.assertNotIn("*", action, where)
                    verb = action.partition(":")[2]
                    reads = reads and verb.startswith(("Describe", "Get"))
                resources = listed(statement["Resource"])
                if not reads:
                    self.assertNotIn("*", resources, where)
                # What changes or ends something is bound to this installation: by condition, or by the resource's name.
                bound = "${aws:PrincipalTag/drums:installation}" in json.dumps(statement)
                named = statement["Sid"] in ("LaunchInto", "TagInTheLaunch")
                self.assertTrue(reads or bound or named, where)


class Deployed(PeerCase):
    # What moto's CloudFormation cannot make. Groups and schedules are made through their API in other tests; alarms and
    # the bucket's policy are only linted.
    MISSING = {
        "AWS::CloudWatch::Alarm",
        "AWS::S3::BucketPolicy",
        "AWS::Scheduler::Schedule",
        "AWS::Scheduler::ScheduleGroup",
        "AWS::SNS::Subscription",  # made only with an address
    }

    def test_what_the_emulator_can_make_is_made(self):
        subnet = self.client("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
        given = {
            "Installation": INSTALLATION,
            "CoordinatorPrincipal": "arn:aws:iam::123456789012:root",
            "CanarySubnet": subnet,
        }
        cloudformation = self.client("cloudformation")
        cloudformation.create_stack(
            StackName="drums",
            TemplateBody=(HERE / "stack.json").read_text(),
            Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in given.items()],
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )
        self.assertEqual(cloudformation.describe_stacks(StackName="drums")["Stacks"][0]["StackStatus"], "CREATE_COMPLETE")
        made = cloudformation.describe_stack_resources(StackName="drums")["StackResources"]
        there = {resource.get("ResourceType") for resource in made}
        wanted = {r["Type"] for r in assemble.assembled()["Resources"].values()}
        self.assertEqual(wanted - there, self.MISSING)

        iam = self.client("iam")
        for role, policy in (("coordinator", "coordinator"), ("schedule", "schedule"), ("sweeper", "sweeper")):
            name = f"drums-{role}-{INSTALLATION}"
            document = iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"]
            # moto keeps a policy from a template as Python would print it.
            self.assertEqual(ast.literal_eval(document) if isinstance(document, str) else document, POLICIES[policy])
            tags = {tag["Key"]: tag["Value"] for tag in iam.list_role_tags(RoleName=name)["Tags"]}
            self.assertEqual(tags, {"drums:installation": INSTALLATION}, "the policies' variable")
        profile = iam.get_instance_profile(InstanceProfileName=f"drums-host-{INSTALLATION}")["InstanceProfile"]
        self.assertEqual([role["RoleName"] for role in profile["Roles"]], [f"drums-host-{INSTALLATION}"])
