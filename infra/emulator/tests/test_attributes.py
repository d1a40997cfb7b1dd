from botocore.exceptions import ClientError

from .peer import PeerCase


class Attributes(PeerCase):
    def setUp(self):
        super().setUp()
        self.ec2 = self.client("ec2")

    def protect(self, id_, on=True, **more):
        self.ec2.modify_instance_attribute(InstanceId=id_, DisableApiStop={"Value": on}, **more)

    def attribute(self, id_, name):
        said = self.ec2.describe_instance_attribute(InstanceId=id_, Attribute=name)
        return said[name[0].upper() + name[1:]]["Value"]

    def shown(self, id_):
        return self.ec2.describe_instances(InstanceIds=[id_])["Reservations"][0]["Instances"][0]

    def refused(self, call, *ids):
        with self.assertRaisesRegex(ClientError, "OperationNotPermitted.*disableApiStop"):
            call(InstanceIds=list(ids))

    def test_stop_protection_forbids_a_stop_and_a_termination_of_all_of_a_call(self):
        free, protected = self.launch(self.ec2), self.launch(self.ec2)
        self.assertFalse(self.attribute(protected, "disableApiStop"))
        self.protect(protected)
        self.assertTrue(self.attribute(protected, "disableApiStop"))
        self.assertFalse(self.attribute(protected, "disableApiTermination"), "it is another attribute")
        for call in (self.ec2.stop_instances, self.ec2.terminate_instances):
            self.refused(call, protected)
            self.refused(call, free, protected)
        self.assertEqual((self.state(free), self.state(protected)), ("running", "running"))
        self.ec2.modify_instance_attribute(InstanceId=protected, DisableApiTermination={"Value": False})
        self.refused(self.ec2.terminate_instances, protected)
        self.protect(protected, on=False)
        self.ec2.stop_instances(InstanceIds=[free, protected])
        self.assertEqual((self.state(free), self.state(protected)), ("stopped", "stopped"))

    def test_termination_protection_forbids_no_stop(self):
        id_ = self.launch(self.ec2, DisableApiTermination=True)
        self.assertTrue(self.attribute(id_, "disableApiTermination"), "asked for by the launch")
        self.ec2.stop_instances(InstanceIds=[id_])
        with self.assertRaisesRegex(ClientError, "OperationNotPermitted.*disableApiTermination"):
            self.ec2.terminate_instances(InstanceIds=[id_])

    def test_no_protection_forbids_a_shutdown_from_within(self):
        id_ = self.launch(self.ec2, DisableApiStop=True, InstanceInitiatedShutdownBehavior="terminate")
        self.refused(self.ec2.stop_instances, id_)
        self.control("POST", "guest", {"instance": id_, "event": "poweroff"})
        self.assertEqual(self.state(id_), "terminated")

    def test_the_shutdown_behaviour_is_edited_and_nothing_else_with_it(self):
        group = self.control("GET", "network?region=us-east-1")["security_group"]
        id_ = self.launch(self.ec2, InstanceInitiatedShutdownBehavior="terminate", SecurityGroupIds=[group])
        before = self.shown(id_)["SecurityGroups"]
        self.assertTrue(before)
        edit = self.ec2.modify_instance_attribute
        edit(InstanceId=id_, InstanceInitiatedShutdownBehavior={"Value": "stop"})
        self.assertEqual(self.attribute(id_, "instanceInitiatedShutdownBehavior"), "stop")
        self.assertEqual(self.shown(id_)["SecurityGroups"], before)
        with self.assertRaisesRegex(ClientError, "InvalidParameterValue"):
            edit(InstanceId=id_, InstanceInitiatedShutdownBehavior={"Value": "hibernate"})
        self.control("POST", "guest", {"instance": id_, "event": "poweroff"})
        self.assertEqual(self.state(id_), "stopped")

    def test_one_call_edits_one_attribute(self):
        id_ = self.launch(self.ec2)
        with self.assertRaisesRegex(ClientError, "InvalidParameterCombination"):
            self.protect(id_, DisableApiTermination={"Value": True})
        self.assertFalse(self.attribute(id_, "disableApiStop"))

    def test_someone_edits_without_a_call(self):
        tags = [{"Key": "a", "Value": "b"}]
        id_ = self.launch(self.ec2, TagSpecifications=[{"ResourceType": "instance", "Tags": tags}])
        calls = len([e for e in self.control("GET", "journal") if e["by"] == "TEST"])
        edits = {"disable_api_stop": True, "instance_initiated_shutdown_behavior": "terminate", "tags": {"a": None, "c": "d"}}
        self.control("POST", "edit", {"instance": id_} | edits)
        (seen,) = [i for i in self.control("GET", "instances") if i["id"] == id_]
        shown = {key: seen[key] for key in ("stop_protected", "protected", "shutdown_behavior", "tags")}
        want = {"stop_protected": True, "protected": False, "shutdown_behavior": "terminate", "tags": {"c": "d"}}
        self.assertEqual(shown, want)
        self.assertEqual(len([e for e in self.control("GET", "journal") if e["by"] == "TEST"]), calls)
        for unknown in ({"client_token": "x"}, {"instance_initiated_shutdown_behavior": "halt"}):
            with self.assertRaisesRegex(ValueError, "nobody can edit|no shutdown behaviour"):
                self.control("POST", "edit", {"instance": id_} | unknown)

    def test_an_instance_profile_is_checked_and_shown(self):
        with self.assertRaisesRegex(ClientError, "InvalidParameterValue.*iamInstanceProfile"):
            self.launch(self.ec2, IamInstanceProfile={"Name": "nobody"})
        with self.assertRaisesRegex(ClientError, "InvalidParameterValue.*iamInstanceProfile"):
            self.launch(self.ec2, IamInstanceProfile={"Arn": "arn:aws:iam::123456789012:instance-profile/nobody"})
        self.control("POST", "role", {"profile": "somebody"})
        arn = "arn:aws:iam::123456789012:instance-profile/somebody"
        for asked in ({"Name": "somebody"}, {"Arn": arn}):
            id_ = self.launch(self.ec2, IamInstanceProfile=asked)
            self.assertEqual(self.shown(id_)["IamInstanceProfile"]["Arn"], arn)
        self.assertEqual([i["profile"] for i in self.control("GET", "instances") if i["id"] == id_], [arn])
