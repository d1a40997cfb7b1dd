import datetime
import json

from botocore.exceptions import ClientError

from .peer import PeerCase

ROLE = "arn:aws:iam::123456789012:role/drums-schedule"
TARGET = "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
INSTALLATION = {"drums:installation": "lab"}


class Schedules(PeerCase):
    def setUp(self):
        super().setUp()
        self.ec2, self.scheduler = self.client("ec2"), self.client("scheduler")
        self.control("POST", "principals", {"drums-schedule": {"policy": "schedule", "tags": INSTALLATION}})

    def host(self, **more):
        tags = [{"Key": key, "Value": value} for key, value in INSTALLATION.items()]
        return self.launch(self.ec2, TagSpecifications=[{"ResourceType": "instance", "Tags": tags}], **more)

    def schedule(self, id_, in_s, name=None, target=None, **more):
        at = datetime.datetime.fromtimestamp(self.now() + in_s, datetime.UTC)
        asked = {
            "Name": name or f"end-{id_}",
            "ScheduleExpression": f"at({at:%Y-%m-%dT%H:%M:%S})",
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "Target": {"Arn": TARGET, "RoleArn": ROLE, "Input": json.dumps({"InstanceIds": [id_]})} | (target or {}),
        }
        self.scheduler.create_schedule(**(asked | more))
        return asked["Name"]

    def fired(self):
        return [entry for entry in self.control("GET", "journal") if entry["by"] == "scheduler"]

    def test_it_fires_once_at_its_time_and_stays(self):
        id_ = self.host()
        name = self.schedule(id_, 600)
        before = len(self.fired())
        self.advance(599)
        self.assertEqual(self.state(id_), "running")
        self.advance(1)
        self.assertEqual(self.state(id_), "terminated")
        self.advance(3000)
        self.assertEqual(len(self.fired()), before + 1)
        self.assertEqual(self.scheduler.get_schedule(Name=name)["State"], "ENABLED")

    def test_it_is_gone_after_it_fired_if_that_was_asked_for(self):
        name = self.schedule(self.host(), 60, ActionAfterCompletion="DELETE")
        self.scheduler.get_schedule(Name=name)
        self.advance(60)
        with self.assertRaisesRegex(ClientError, "ResourceNotFoundException"):
            self.scheduler.get_schedule(Name=name)

    def test_a_disabled_or_deleted_one_does_not_fire_and_a_moved_one_fires_then(self):
        disabled, deleted, moved = self.host(), self.host(), self.host()
        self.schedule(disabled, 60, State="DISABLED")
        self.scheduler.delete_schedule(Name=self.schedule(deleted, 60))
        name = self.schedule(moved, 60)
        later = datetime.datetime.fromtimestamp(self.now() + 120, datetime.UTC)
        now = self.scheduler.get_schedule(Name=name)
        self.scheduler.update_schedule(
            Name=name,
            ScheduleExpression=f"at({later:%Y-%m-%dT%H:%M:%S})",
            FlexibleTimeWindow=now["FlexibleTimeWindow"],
            Target=now["Target"],
        )
        self.advance(119)
        self.assertEqual([self.state(i) for i in (disabled, deleted, moved)], ["running"] * 3)
        self.advance(1)
        self.assertEqual([self.state(i) for i in (disabled, deleted, moved)], ["running", "running", "terminated"])

    def test_what_a_role_may_not_do_is_seen_only_when_it_fires_and_ends_in_the_dead_letters(self):
        sqs = self.client("sqs")
        queue = sqs.create_queue(QueueName="drums-dead-letters-lab")["QueueUrl"]
        letters = {"DeadLetterConfig": {"Arn": "arn:aws:sqs:us-east-1:123456789012:drums-dead-letters-lab"}}
        id_ = self.launch(self.ec2)
        self.schedule(id_, 60, target=letters)
        self.advance(3600)
        self.assertEqual(self.state(id_), "running")
        self.assertIn("may not terminate", self.fired()[-1]["error"])
        (letter,) = sqs.receive_message(QueueUrl=queue, MessageAttributeNames=["All"])["Messages"]
        self.assertEqual(json.loads(letter["Body"]), {"InstanceIds": [id_]})
        self.assertIn("may not terminate", letter["MessageAttributes"]["ERROR_MESSAGE"]["StringValue"])
        sqs.delete_message(QueueUrl=queue, ReceiptHandle=letter["ReceiptHandle"])

        # A role that is gone cannot even tell.
        self.control("POST", "principals", {"drums-schedule": None})
        own = self.host()
        self.schedule(own, 60, target=letters)
        self.advance(3600)
        self.assertEqual(self.state(own), "running")
        self.assertNotIn("Messages", sqs.receive_message(QueueUrl=queue))

    def test_the_role_reaches_only_its_own_installation(self):
        id_ = self.launch(self.ec2)
        self.schedule(id_, 60)
        self.advance(60)
        self.assertEqual(self.state(id_), "running")

    def test_a_target_that_fails_is_tried_again_once_a_minute(self):
        id_ = self.host()
        self.ec2.modify_instance_attribute(InstanceId=id_, DisableApiTermination={"Value": True})
        before = len(self.fired())
        self.schedule(id_, 60, target={"RetryPolicy": {"MaximumRetryAttempts": 5, "MaximumEventAgeInSeconds": 3600}})
        self.advance(60 + 130)
        self.assertEqual((self.state(id_), len(self.fired()) - before), ("running", 3))
        self.ec2.modify_instance_attribute(InstanceId=id_, DisableApiTermination={"Value": False})
        self.advance(60)
        self.assertEqual((self.state(id_), len(self.fired()) - before), ("terminated", 4))
        self.advance(3000)
        self.assertEqual(len(self.fired()) - before, 4)

    def test_a_group_holds_schedules_of_its_own(self):
        self.scheduler.create_schedule_group(Name="drums")
        id_ = self.host()
        name = self.schedule(id_, 60, GroupName="drums")
        with self.assertRaisesRegex(ClientError, "ResourceNotFoundException"):
            self.scheduler.get_schedule(Name=name)
        self.assertEqual(self.scheduler.get_schedule(Name=name, GroupName="drums")["GroupName"], "drums")
        self.advance(60)
        self.assertEqual(self.state(id_), "terminated")

    def test_the_clock_does_not_go_back(self):
        with self.assertRaisesRegex(ValueError, "does not go back"):
            self.advance(-1)
