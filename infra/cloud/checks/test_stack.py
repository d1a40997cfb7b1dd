import ast
import json
import pathlib
import subprocess
import sys
import unittest

import assemble
from emulator.iam import Iam
from tests.peer import PeerCase

HERE = pathlib.Path(__file__).resolve().parents[1]
POLICIES = {path.stem: json.loads(path.read_text()) for path in (HERE / "policies").glob("*.json")}
INSTALLATION = "0a1b2c3d"


def listed(value):
    return value if isinstance(value, list) else [value]


class Files(unittest.TestCase):
    def test_the_stack_is_put_together_from_its_files_as_they_are(self):
        for name in assemble.NAMES:
            here = (HERE / f"{name}.json").read_text()
            self.assertEqual(here, assemble.text(name), "run: python assemble.py")
            self.assertLess(len(here.encode()), 51_200, "what CloudFormation takes without a bucket")

    def test_the_stack_passes_cfn_lint(self):
        lint = pathlib.Path(sys.executable).with_name("cfn-lint")
        templates = [HERE / f"{name}.json" for name in assemble.NAMES]
        done = subprocess.run([lint, "--include-checks", "W", "--", *templates], capture_output=True, text=True)
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


    def test_no_other_role_takes_the_sweeper_away(self):
        resources = assemble.assembled("stack")["Resources"]
        schedule = resources["EveryMinute"]["Properties"]
        group = resources[schedule["GroupName"]["Ref"]]["Properties"]["Name"]["Fn::Sub"]
        name = schedule["Name"]["Fn::Sub"].replace("${Installation}", INSTALLATION)
        iam = Iam(HERE / "policies")
        tags = {"drums:installation": INSTALLATION}
        for action in ("Create", "Update", "Delete"):
            may = lambda of, what: iam.allows(  # noqa: E731
                {"policy": ["coordinator", "evidence"], "tags": tags},
                f"scheduler:{action}Schedule",
                f"arn:aws:scheduler:us-east-1:123456789012:schedule/{of}/{what}",
                {},
            )
            self.assertTrue(may(f"drums-{INSTALLATION}", "a-host"), "hosts' schedules are its business")
            self.assertFalse(may(group.replace("${Installation}", INSTALLATION), name))


# What moto's CloudFormation cannot make. Groups and schedules are made through their API in other tests; alarms and the
# bucket's policy are only linted.
MISSING = {
    "AWS::CloudWatch::Alarm",
    "AWS::Lambda::EventInvokeConfig",
    "AWS::S3::BucketPolicy",
    "AWS::Scheduler::Schedule",
    "AWS::Scheduler::ScheduleGroup",
    "AWS::SNS::Subscription",  # made only with an address
}


def deployed(case, name, region, installation, **more):
    """The stack's outputs, once all that can be made is made."""
    subnet = case.client("ec2", region).describe_subnets()["Subnets"][0]["SubnetId"]
    given = {"Installation": installation, "CanarySubnet": subnet} | more
    cloudformation = case.client("cloudformation", region)
    cloudformation.create_stack(
        StackName="drums",
        TemplateBody=(HERE / f"{name}.json").read_text(),
        Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in given.items()],
        Capabilities=["CAPABILITY_NAMED_IAM"],
    )
    stack = cloudformation.describe_stacks(StackName="drums")["Stacks"][0]
    case.assertEqual(stack["StackStatus"], "CREATE_COMPLETE")
    made = cloudformation.describe_stack_resources(StackName="drums")["StackResources"]
    wanted = {r["Type"] for r in assemble.assembled(name)["Resources"].values()}
    case.assertEqual(wanted - {resource.get("ResourceType") for resource in made} - MISSING, set())
    return {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}


class Deployed(PeerCase):
    def test_what_the_emulator_can_make_is_made(self):
        deployed(self, "stack", "us-east-1", INSTALLATION, CoordinatorPrincipal="arn:aws:iam::123456789012:root")

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

    def test_a_further_region_has_what_hosts_there_need(self):
        told = deployed(self, "region", "eu-central-1", INSTALLATION)
        self.assertEqual(told["CanaryRegion"], "eu-central-1")
        self.assertEqual(told["DeadLetterArn"], f"arn:aws:sqs:eu-central-1:123456789012:drums-dead-letters-{INSTALLATION}")
        shown = self.client("ec2", "eu-central-1").describe_instances(InstanceIds=[told["CanaryInstance"]])
        tags = {tag["Key"]: tag["Value"] for tag in shown["Reservations"][0]["Instances"][0]["Tags"]}
        self.assertEqual((tags["drums:installation"], tags["drums:role"]), (INSTALLATION, "canary"))
        named = f"{told['CanaryRegion']} {told['CanaryInstance']}"
        pattern = assemble.assembled("stack")["Parameters"]["OtherCanaries"]["AllowedPattern"]
        for text in ("", named, f"{named},{named}"):
            self.assertRegex(text, f"^{pattern}$", "what the sweeper is told of it")
