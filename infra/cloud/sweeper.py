# Ends what is overdue, by what EC2 shows alone: the rules of `drumsctl sweep`, written a second time on purpose: one
# fault does not stop both. It lies in the template as it is, so that nothing has to be uploaded before the first paid run.
import functools
import os
import re
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timedelta, timezone

import boto3
from botocore.config import Config

TOKEN = re.compile(r"drums1-([0-9a-f]{8})-([0-9a-f]{10})-[0-9a-f]{16}-[0-9a-f]{4}")
ALIVE = ("pending", "running", "stopping", "stopped")
# A region that does not answer is given up before the function's own 55 seconds are over: what became of the others is told.
PATIENCE_S = 30
SETTINGS = Config(retries={"mode": "standard", "total_max_attempts": 2}, connect_timeout=3, read_timeout=8)


def read(text):
    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return when if when.tzinfo else None
    except ValueError:
        return None


class Sweep:
    def __init__(self, client, ours, canaries, longest, shadow, now):
        self.client, self.ours, self.canaries = client, ours, canaries
        self.longest, self.shadow, self.now = longest, shadow, now
        self.ended, self.failed, self.found = [], [], set()

    def run(self, only=()):
        """`only`: the regions in scope, or none for all that are enabled. A canary's region always is."""
        regions = {region for region, _ in self.canaries} | set(only or self.enabled())
        pool = ThreadPoolExecutor(len(regions))
        # Clients may be shared by threads, and must not be made by several at once.
        jobs = {pool.submit(self.region, self.client(region), region): region for region in sorted(regions)}
        late = wait(jobs, PATIENCE_S).not_done
        pool.shutdown(wait=False, cancel_futures=True)
        self.failed += [f"{jobs[job]}: not done in {PATIENCE_S} s" for job in late]
        self.failed += [f"no canary {canary}" for canary in sorted(self.canaries - self.found)]
        # Launches wait for it.
        if not self.failed and not self.shadow:
            tag = {"Key": "drums:swept", "Value": f"{self.now:%Y-%m-%dT%H:%M:%SZ}"}
            for region, id_ in sorted(self.canaries):
                self.client(region).create_tags(Resources=[id_], Tags=[tag])
        print({"ended": self.ended, "shadow": self.shadow, "regions": len(regions)})
        if self.failed:
            raise RuntimeError("; ".join(self.failed))
        return self.ended

    def enabled(self):
        """Asked where the canaries are, one after the other: a region that is away hides no other one."""
        errors = []
        for region, _ in sorted(self.canaries):
            try:
                return [r["RegionName"] for r in self.client(region).describe_regions()["Regions"]]
            except Exception as error:
                errors.append(str(error))
        self.failed.append(f"which regions there are is not known, {errors}")
        return []

    def region(self, ec2, region):
        seen = {}
        pages = ec2.get_paginator("describe_instances").paginate
        for name, value in ("tag:drums:installation", self.ours), ("client-token", f"drums1-{self.ours}-*"):
            # What was seen before a failure is judged all the same.
            try:
                for page in pages(Filters=[{"Name": name, "Values": [value]}]):
                    seen |= {i["InstanceId"]: i for r in page["Reservations"] for i in r["Instances"]}
            except Exception as error:
                self.failed.append(f"{region}: {error}")
        for id_, host in seen.items():
            try:
                self.judge(ec2, region, id_, host)
            except Exception as error:
                self.failed.append(f"{region} {id_}: {error}")

    def judge(self, ec2, region, id_, host):
        if host["State"]["Name"] not in ALIVE:
            return
        tags = {t["Key"]: t["Value"] for t in host.get("Tags", [])}
        token = TOKEN.fullmatch(host.get("ClientToken", ""))
        if tags.get("drums:role") == "canary" and not token:
            if (region, id_) in self.canaries:
                return self.found.add((region, id_))
            if host["State"]["Name"] == "stopped":
                return print(f"{region} {id_} looks like a canary: name it to the sweeper, or end it")
        due = self.due(host, tags, token)
        if due and due <= self.now:
            self.ended.append(f"{region} {id_}, due {due}")
            if not self.shadow:
                end(ec2, id_)

    def due(self, host, tags, token):
        """None: not ours. No token can be edited: beside one, tags only shorten."""
        told = read(tags.get("drums:deadline", ""))
        if token:
            if token[1] != self.ours:
                return None
            registered = datetime.fromtimestamp(int(token[2], 16), timezone.utc)
        elif tags.get("drums:installation") == self.ours:
            registered = host["LaunchTime"] + (self.longest if told else timedelta())
        else:
            return None
        return min(registered, told or registered)


def end(ec2, id_):
    try:
        ec2.terminate_instances(InstanceIds=[id_])
    except ec2.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "OperationNotPermitted":
            raise
        for name in "DisableApiTermination", "DisableApiStop":  # either forbids it
            try:
                ec2.modify_instance_attribute(InstanceId=id_, **{name: {"Value": False}})
            except Exception as error:
                print(id_, error)
        ec2.terminate_instances(InstanceIds=[id_])


@functools.cache
def client(region):
    return boto3.client("ec2", region, config=SETTINGS)


def handler(event, context):
    env = os.environ
    canaries = {tuple(named.split()) for named in env["CANARIES"].split(",") if named}
    longest = timedelta(hours=float(env["LONGEST_LIFE_HOURS"]))
    sweep = Sweep(client, env["INSTALLATION"], canaries, longest, env["SHADOW"] == "yes", datetime.now(timezone.utc))
    return sweep.run([region for region in env["REGIONS"].split(",") if region])
