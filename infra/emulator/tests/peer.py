"""An emulator of the test's own, and AWS's Python SDK pointed at it."""

import contextlib
import functools
import json
import pathlib
import subprocess
import sys
import unittest
import urllib.error
import urllib.request

import boto3
from botocore.config import Config

HERE = pathlib.Path(__file__).resolve().parents[1]
START = 1_796_000_000  # where the cloud's clock stands at first
TYPE = "c8i.large"


class PeerCase(unittest.TestCase):
    """One emulator for the tests of a class; each of them must do with what the others left."""

    @classmethod
    def setUpClass(cls):
        command = [sys.executable, "-m", "emulator", "--with-parent", "--now", str(START)]
        process = subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        cls.addClassCleanup(cls._end, process)
        cls.endpoint = json.loads(process.stdout.readline())["endpoint"]

    @staticmethod
    def _end(process):
        # The end of its standard input ends it: nothing is left when a test dies.
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=20)

    def setUp(self):
        self.control("DELETE", "faults")
        self.control("POST", "settings", {"seconds": {"pending": 0, "stopping": 0, "shutting-down": 0}})

    @functools.cache
    def client(self, service, region="us-east-1", key_id="TEST", attempts=1, **config):
        return boto3.client(
            service,
            region_name=region,
            endpoint_url=self.endpoint,
            aws_access_key_id=key_id,
            aws_secret_access_key="secret",
            config=Config(retries={"total_max_attempts": attempts}, **config),
        )

    def control(self, method, name, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.endpoint}/_emulator/{name}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                raise ValueError(json.load(error)["error"]) from None

    def now(self):
        return self.control("GET", "clock")["now"]

    def advance(self, seconds):
        self.control("POST", "clock", {"advance_s": seconds})

    def fault(self, **fault):
        self.control("POST", "faults", fault)

    @functools.cache
    def image(self, ec2):
        """One of those that there are; any of them will do."""
        return ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]

    def launch(self, ec2, **more):
        asked = {"ImageId": self.image(ec2), "InstanceType": TYPE, "MinCount": 1, "MaxCount": 1}
        return ec2.run_instances(**(asked | more))["Instances"][0]["InstanceId"]

    def state(self, instance_id):
        """As it is; "forgotten" once no API knows it any more."""
        states = {i["id"]: i["state"] for i in self.control("GET", "instances")}
        return states.get(instance_id, "forgotten")
