import json
import time
import urllib.request

from botocore.exceptions import ClientError, ConnectionClosedError, ReadTimeoutError
from botocore.parsers import create_parser
from botocore.serialize import create_serializer

from .peer import PeerCase


class Faults(PeerCase):
    def setUp(self):
        super().setUp()
        self.ec2 = self.client("ec2")

    def with_token(self, token):
        return [i for i in self.control("GET", "instances") if i["client_token"] == token]

    def test_an_error_is_answered_as_often_as_asked_and_where_asked(self):
        self.fault(action="DescribeRegions", code="InternalError", status=500, count=2, skip=1)
        self.ec2.describe_regions()
        for _ in range(2):
            with self.assertRaisesRegex(ClientError, "InternalError"):
                self.ec2.describe_regions()
        self.ec2.describe_regions()
        self.fault(action="RunInstances", where={"InstanceType": "m7i.large"}, code="InsufficientInstanceCapacity", count=None)
        self.fault(action="RunInstances", region="eu-central-1", code="Other")
        self.launch(self.ec2)
        for _ in range(3):
            with self.assertRaisesRegex(ClientError, "InsufficientInstanceCapacity"):
                self.launch(self.ec2, InstanceType="m7i.large")
        self.control("DELETE", "faults")
        self.launch(self.ec2, InstanceType="m7i.large")

    def test_each_protocol_says_errors_and_throttling_its_own_way(self):
        calls = {
            "ec2": (lambda: self.ec2.describe_regions(), "RequestLimitExceeded"),
            "scheduler": (lambda: self.client("scheduler").list_schedules(), "ThrottlingException"),
            "ssm": (lambda: self.client("ssm").describe_parameters(), "ThrottlingException"),
            "pricing": (lambda: self.client("pricing").get_products(ServiceCode="AmazonEC2"), "ThrottlingException"),
            "iam": (lambda: self.client("iam").list_roles(), "Throttling"),
        }
        for service, (call, code) in calls.items():
            with self.subTest(service):
                self.fault(service=service, throttle=True)
                with self.assertRaises(ClientError) as raised:
                    call()
                self.assertEqual(raised.exception.response["Error"]["Code"], code)
                self.fault(service=service, code="Injected", status=500)
                with self.assertRaisesRegex(ClientError, "Injected"):
                    call()
                call()

    def test_a_lost_reply_is_of_a_call_that_was_carried_out(self):
        self.fault(action="RunInstances", lose=True)
        with self.assertRaises(ConnectionClosedError):
            self.launch(self.ec2, ClientToken="lost")
        (made,) = self.with_token("lost")
        self.assertEqual(self.launch(self.ec2, ClientToken="lost"), made["id"])
        self.fault(action="RunInstances", code="InternalError", status=500, after=True)
        with self.assertRaisesRegex(ClientError, "InternalError"):
            self.launch(self.ec2, ClientToken="lost-too")
        self.assertEqual(len(self.with_token("lost-too")), 1)

    def test_a_late_reply_comes_after_the_caller_has_given_up(self):
        hasty = self.client("ec2", read_timeout=1)
        image = self.image(self.ec2)
        self.fault(action="RunInstances", delay_s=3)
        with self.assertRaises(ReadTimeoutError):
            self.launch(hasty, ImageId=image, ClientToken="late")
        give_up = time.monotonic() + 20
        while not self.with_token("late"):
            self.assertLess(time.monotonic(), give_up, "the call was not carried out")
        self.assertEqual(len(self.with_token("late")), 1)

    def test_a_call_that_arrives_twice(self):
        self.fault(action="RunInstances", twice=True, count=None)
        self.launch(self.ec2, ClientToken="twice")
        self.assertEqual(len(self.with_token("twice")), 1)
        self.fault(action="CreateVpc", twice=True)
        before = len(self.ec2.describe_vpcs()["Vpcs"])
        self.ec2.create_vpc(CidrBlock="10.9.0.0/16")
        self.assertEqual(len(self.ec2.describe_vpcs()["Vpcs"]), before + 2, "what has no token is made twice")

    def test_the_journal_has_every_call_with_its_parameters(self):
        since = len(self.control("GET", "journal"))
        self.fault(action="DescribeRegions", code="InternalError", status=500)
        with self.assertRaises(ClientError):
            self.ec2.describe_regions(RegionNames=["us-east-1"])
        self.ec2.describe_regions(RegionNames=["us-east-1"])
        self.client("ssm", key_id="OTHER").get_parameters(Names=["/a"])
        seen = self.control("GET", f"journal?since={since}")
        shown = [(e["by"], e["service"], e["action"], e["status"]) for e in seen]
        self.assertEqual(
            shown,
            [
                ("TEST", "ec2", "DescribeRegions", 500),
                ("TEST", "ec2", "DescribeRegions", 200),
                ("OTHER", "ssm", "GetParameters", 200),
            ],
        )
        self.assertEqual(seen[0]["params"]["RegionName.1"], "us-east-1")
        self.assertEqual(seen[2]["params"], {"Names": ["/a"]})

    def test_what_is_not_known_is_refused(self):
        for method, name, body in (
            ("POST", "faults", {"acton": "RunInstances"}),
            ("POST", "settings", {"seconds": {"shutting_down": 1}}),
            ("POST", "principals", {"K": {"policy": "none-such"}}),
            ("GET", "nothing", None),
        ):
            with self.subTest(name), self.assertRaises(ValueError):
                self.control(method, name, body)


class Prices(PeerCase):
    FILTERS = {"instanceType": "c8i.large", "regionCode": "us-east-1", "operatingSystem": "Linux", "tenancy": "Shared"}

    def products(self, more=None, **asked):
        filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in (more or self.FILTERS).items()]
        return self.client("pricing").get_products(ServiceCode="AmazonEC2", Filters=filters, **asked)

    def test_a_price_is_json_inside_json(self):
        (text,) = self.products()["PriceList"]
        product = json.loads(text)
        (term,) = product["terms"]["OnDemand"].values()
        (dimension,) = term["priceDimensions"].values()
        self.assertEqual((dimension["unit"], dimension["pricePerUnit"]), ("Hrs", {"USD": "0.0937000000"}))
        self.assertEqual(product["product"]["attributes"]["instanceType"], "c8i.large")

    def test_an_unknown_one_is_an_empty_list_and_prices_can_be_set(self):
        asked = self.FILTERS | {"instanceType": "c8i.metal-48xl"}
        self.assertEqual(self.products(asked)["PriceList"], [])
        self.control("POST", "settings", {"prices": {"us-east-1": {"c8i.metal-48xl": "9.0", "c8i.large": "0.1"}}})
        self.assertEqual(len(self.products(asked)["PriceList"]), 1)

    def test_there_are_pages(self):
        by_region = {"regionCode": "eu-central-1"}
        whole = self.products(by_region)["PriceList"]
        first = self.products(by_region, MaxResults=1)
        rest = self.products(by_region, NextToken=first["NextToken"])
        self.assertEqual(first["PriceList"] + rest["PriceList"], whole)


class Metrics(PeerCase):
    """AWS's Rust SDK speaks rpc-v2-cbor here, the Python one does not choose it: its own parts for it check our answers."""

    def call(self, operation, **asked):
        model = self.client("cloudwatch").meta.service_model.operation_model(operation)
        request = create_serializer("smithy-rpc-v2-cbor").serialize_to_request(asked, model)
        scope = "Credential=TEST/20261130/us-east-1/monitoring/aws4_request"
        headers = request["headers"] | {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0"}
        url = f"{self.endpoint}/service/GraniteServiceVersion20100801/operation/{operation}"
        sent = urllib.request.Request(url, request["body"], headers, method="POST")
        with urllib.request.urlopen(sent, timeout=20) as answer:
            said = {"status_code": answer.status, "headers": dict(answer.headers), "body": answer.read()}
        return create_parser("smithy-rpc-v2-cbor").parse(said, model.output_shape) if model.output_shape else {}

    def test_metrics_and_alarms_over_cbor(self):
        dimensions = [{"Name": "host", "Value": "i-1"}]
        data = [{"MetricName": "beat", "Value": 1.5, "Dimensions": dimensions}]
        self.call("PutMetricData", Namespace="Drums", MetricData=data)
        shown = self.call("ListMetrics", Namespace="Drums")["Metrics"]
        self.assertEqual(shown, [{"Namespace": "Drums", "MetricName": "beat", "Dimensions": dimensions}])
        self.call("PutMetricAlarm", AlarmName="silent", ComparisonOperator="LessThanThreshold", EvaluationPeriods=300)
        (shown,) = self.call("DescribeAlarms")["MetricAlarms"]
        self.assertEqual(
            (shown["AlarmName"], shown["StateValue"], shown["EvaluationPeriods"]), ("silent", "INSUFFICIENT_DATA", 300)
        )
        self.call("DeleteAlarms", AlarmNames=["silent"])
        self.assertEqual(self.call("DescribeAlarms")["MetricAlarms"], [])
