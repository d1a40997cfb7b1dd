import base64

from botocore.exceptions import ClientError

from .peer import TYPE, PeerCase


class Machines(PeerCase):
    def test_a_token_names_one_launch(self):
        ec2 = self.client("ec2")
        first = self.launch(ec2, ClientToken="a-token")
        self.assertEqual(self.launch(ec2, ClientToken="a-token"), first)
        self.assertNotEqual(self.launch(ec2, ClientToken="another"), first)
        with self.assertRaisesRegex(ClientError, "IdempotentParameterMismatch"):
            self.launch(ec2, ClientToken="a-token", InstanceType="m7i.large")
        elsewhere = self.client("ec2", "eu-central-1")
        self.assertNotEqual(self.launch(elsewhere, ClientToken="a-token"), first)
        ec2.terminate_instances(InstanceIds=[first])
        again = ec2.run_instances(
            ImageId=self.image(ec2), InstanceType=TYPE, MinCount=1, MaxCount=1, ClientToken="a-token"
        )["Instances"][0]
        self.assertEqual((again["InstanceId"], again["State"]["Name"]), (first, "terminated"))

    def test_an_instance_is_found_by_its_token(self):
        ec2 = self.client("ec2")
        id_ = self.launch(ec2, ClientToken="find-me")
        by = lambda token: ec2.describe_instances(Filters=[{"Name": "client-token", "Values": [token]}])  # noqa: E731
        self.assertEqual(by("find-me")["Reservations"][0]["Instances"][0]["InstanceId"], id_)
        self.assertEqual(by("find-*")["Reservations"][0]["Instances"][0]["InstanceId"], id_)
        self.assertEqual(by("never-used")["Reservations"], [])

    def test_cpu_options_are_checked_and_shown(self):
        ec2 = self.client("ec2")
        nested = {"NestedVirtualization": "enabled"}
        id_ = self.launch(ec2, CpuOptions=nested)
        shown = ec2.describe_instances(InstanceIds=[id_])["Reservations"][0]["Instances"][0]["CpuOptions"]
        self.assertEqual(shown, {"CoreCount": 1, "ThreadsPerCore": 2, "NestedVirtualization": "enabled"})
        plain = self.launch(ec2)
        shown = ec2.describe_instances(InstanceIds=[plain])["Reservations"][0]["Instances"][0]["CpuOptions"]
        self.assertEqual(shown, {"CoreCount": 1, "ThreadsPerCore": 2})
        for refused in (
            {"InstanceType": "t3.micro", "CpuOptions": nested},
            {"CpuOptions": nested, "InstanceMarketOptions": {"MarketType": "spot"}},
        ):
            with self.assertRaisesRegex(ClientError, "UnsupportedOperation"):
                self.launch(ec2, **refused)
        with self.assertRaisesRegex(ClientError, "InvalidParameterValue"):
            self.launch(ec2, InstanceType="z99.large")
        with self.assertRaisesRegex(ClientError, "InvalidParameterValue"):
            self.launch(ec2, UserData="x" * 16385)

    def test_a_dry_run_makes_nothing(self):
        ec2 = self.client("ec2")
        before = len(self.control("GET", "instances"))
        with self.assertRaisesRegex(ClientError, "DryRunOperation"):
            self.launch(ec2, ClientToken="dry", DryRun=True)
        self.assertEqual(len(self.control("GET", "instances")), before)
        self.launch(ec2, ClientToken="dry")
        self.assertEqual(len(self.control("GET", "instances")), before + 1)

    def test_states_take_their_time_or_hang(self):
        ec2 = self.client("ec2")
        self.control("POST", "settings", {"seconds": {"pending": 30, "shutting-down": 60, "stopping": 10}})
        id_ = self.launch(ec2)
        self.assertEqual(self.state(id_), "pending")
        self.advance(30)
        self.assertEqual(self.state(id_), "running")
        ec2.stop_instances(InstanceIds=[id_])
        self.assertEqual(self.state(id_), "stopping")
        self.advance(10)
        self.assertEqual(self.state(id_), "stopped")
        ec2.terminate_instances(InstanceIds=[id_])
        self.advance(59)
        ec2.terminate_instances(InstanceIds=[id_])
        self.assertEqual(self.state(id_), "shutting-down")
        self.advance(1)
        self.assertEqual(self.state(id_), "terminated")
        self.advance(3600)
        self.assertEqual(self.state(id_), "forgotten")
        with self.assertRaisesRegex(ClientError, "InvalidInstanceID.NotFound"):
            ec2.describe_instances(InstanceIds=[id_])

        self.control("POST", "settings", {"seconds": {"pending": 0, "shutting-down": None}})
        id_ = self.launch(ec2)
        ec2.terminate_instances(InstanceIds=[id_])
        self.advance(86400)
        self.assertEqual(self.state(id_), "shutting-down")

    def test_one_protected_instance_keeps_all_of_a_call(self):
        ec2 = self.client("ec2")
        free, protected = self.launch(ec2), self.launch(ec2)
        ec2.modify_instance_attribute(InstanceId=protected, DisableApiTermination={"Value": True})
        with self.assertRaisesRegex(ClientError, "OperationNotPermitted"):
            ec2.terminate_instances(InstanceIds=[free, protected])
        with self.assertRaisesRegex(ClientError, "InvalidInstanceID"):
            ec2.terminate_instances(InstanceIds=[free, "i-0123456789abcdef0"])
        self.assertEqual((self.state(free), self.state(protected)), ("running", "running"))
        ec2.modify_instance_attribute(InstanceId=protected, DisableApiTermination={"Value": False})
        ec2.terminate_instances(InstanceIds=[free, protected])
        self.assertEqual((self.state(free), self.state(protected)), ("terminated", "terminated"))

    def test_what_a_guest_does_to_its_machine(self):
        ec2 = self.client("ec2")
        dies = self.launch(ec2, InstanceInitiatedShutdownBehavior="terminate")
        stops = self.launch(ec2)
        ec2.modify_instance_attribute(InstanceId=dies, DisableApiTermination={"Value": True})
        for id_ in (dies, stops):
            self.control("POST", "guest", {"instance": id_, "event": "halt"})
            self.assertEqual(self.state(id_), "running", "a halted guest is paid for")
            self.control("POST", "guest", {"instance": id_, "event": "poweroff"})
        self.assertEqual((self.state(dies), self.state(stops)), ("terminated", "stopped"))
        with self.assertRaisesRegex(ValueError, "no guest does"):
            self.control("POST", "guest", {"instance": dies, "event": "reboot"})

    def test_all_of_a_launch_can_be_seen(self):
        ec2 = self.client("ec2")
        id_ = self.launch(
            ec2,
            UserData="#!/bin/sh\ntrue\n",
            InstanceInitiatedShutdownBehavior="terminate",
            MetadataOptions={"HttpTokens": "required"},
            TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "drums:a", "Value": "b"}]}],
            BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 20, "DeleteOnTermination": True}}],
        )
        (seen,) = [i for i in self.control("GET", "instances") if i["id"] == id_]
        want = {
            "tags": {"drums:a": "b"},
            "user_data": "#!/bin/sh\ntrue\n",
            "shutdown_behavior": "terminate",
            "http_tokens": "required",
        }
        self.assertEqual({key: seen[key] for key in want}, want)
        self.assertEqual(list(seen["volumes"].values()), [True])
        shown = ec2.describe_instance_attribute(InstanceId=id_, Attribute="userData")["UserData"]["Value"]
        self.assertEqual(base64.b64decode(shown).decode(), "#!/bin/sh\ntrue\n")
        ec2.terminate_instances(InstanceIds=[id_])
        (volume,) = seen["volumes"]
        with self.assertRaisesRegex(ClientError, "InvalidVolume.NotFound"):
            ec2.describe_volumes(VolumeIds=[volume])
