# Ends what is overdue, by what EC2 shows alone: the rules of `drumsctl sweep`, written a second time on purpose: one
# fault does not stop both. At most 4096 characters, to fit into the template.
import os
import re
from datetime import datetime, timedelta, timezone

import boto3
from botocore.config import Config

TOKEN = re.compile(r"drums1-([0-9a-f]{8})-([0-9a-f]{10})-[0-9a-f]{16}-[0-9a-f]{4}")
ALIVE = ("pending", "running", "stopping", "stopped")


def read(text):
    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return when if when.tzinfo else None
    except ValueError:
        return None


def deadline(host, tags, ours, longest):
    """None: not ours. No token can be edited: beside one, tags only shorten."""
    token = TOKEN.fullmatch(host.get("ClientToken", ""))
    told = read(tags.get("drums:deadline", ""))
    if token:
        if token[1] != ours:
            return None
        registered = datetime.fromtimestamp(int(token[2], 16), timezone.utc)
    elif tags.get("drums:installation") == ours:
        registered = host["LaunchTime"] + (longest if told else timedelta())
    else:
        return None
    return min(registered, told or registered)


def sweep(client, ours, canary, longest, shadow, now):
    ended, failed, found = [], [], False
    for region in [r["RegionName"] for r in client(canary[0]).describe_regions()["Regions"]]:
        try:
            ec2, seen = client(region), {}
            pages = ec2.get_paginator("describe_instances").paginate
            for name, value in ("tag-key", "drums:installation"), ("client-token", f"drums1-{ours}-*"):
                for page in pages(Filters=[{"Name": name, "Values": [value]}]):
                    seen |= {i["InstanceId"]: i for r in page["Reservations"] for i in r["Instances"]}
        except Exception as error:
            failed.append(f"{region}: {error}")
            continue
        for id_, host in seen.items():
            try:
                if host["State"]["Name"] not in ALIVE:
                    continue
                tags = {t["Key"]: t["Value"] for t in host.get("Tags", [])}
                named = [region, id_] == canary and tags.get("drums:role") == "canary"
                if named and not TOKEN.fullmatch(host.get("ClientToken", "")):
                    found = True
                    continue
                due = deadline(host, tags, ours, longest)
                if due is None or due > now:
                    continue
                ended.append(f"{region} {id_}, due {due}")
                if not shadow:
                    end(ec2, id_)
            except Exception as error:
                failed.append(f"{region} {id_}: {error}")
    if not found:
        failed.append(f"no canary {canary}")
    # Launches wait for it.
    if not failed and not shadow:
        tag = {"Key": "drums:swept", "Value": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
        client(canary[0]).create_tags(Resources=[canary[1]], Tags=[tag])
    print({"ended": ended, "shadow": shadow})
    if failed:
        raise RuntimeError("; ".join(failed))
    return ended


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


def handler(event, context):
    env = os.environ
    settings = Config(retries={"mode": "standard", "total_max_attempts": 4}, connect_timeout=3, read_timeout=10)
    return sweep(
        lambda region: boto3.client("ec2", region, config=settings),
        env["INSTALLATION"],
        env["CANARY"].split(),
        timedelta(hours=float(env["LONGEST_LIFE_HOURS"])),
        env["SHADOW"] == "yes",
        datetime.now(timezone.utc),
    )
