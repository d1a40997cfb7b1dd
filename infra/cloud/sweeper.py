# Every minute: ends what is past its deadline, by what EC2 shows alone. The rules of `drumsctl sweep`, written a second
# time on purpose: one fault does not stop both. At most 4096 characters, to fit into the template.
import datetime
import os
import re

import boto3
from botocore.config import Config

TOKEN = re.compile(r"drums1-([0-9a-f]{8})-([0-9a-f]{10})-[0-9a-f]{16}-[0-9a-f]{4}")
ALIVE = ("pending", "running", "stopping", "stopped")


def read(text):
    try:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None


def deadline(instance, tags, installation, longest):
    """None for what is not ours. No token can be edited: beside one, tags only shorten."""
    token = TOKEN.fullmatch(instance.get("ClientToken", ""))
    told = read(tags.get("drums:deadline", ""))
    if token:
        if token[1] != installation:
            return None
        registered = datetime.datetime.fromtimestamp(int(token[2], 16), datetime.timezone.utc)
    elif tags.get("drums:installation") == installation:
        registered = instance["LaunchTime"] + (longest if told else datetime.timedelta())
    else:
        return None
    return min(registered, told or registered)


def sweep(client, installation, canary, longest, shadow, now):
    ended, failed, found = [], [], False
    regions = [r["RegionName"] for r in client("ec2", canary[0]).describe_regions()["Regions"]]
    for region in regions:
        try:
            ec2, seen = client("ec2", region), {}
            pages = ec2.get_paginator("describe_instances").paginate
            for name, value in ("tag-key", "drums:installation"), ("client-token", f"drums1-{installation}-*"):
                for page in pages(Filters=[{"Name": name, "Values": [value]}]):
                    seen |= {i["InstanceId"]: i for r in page["Reservations"] for i in r["Instances"]}
        except Exception as error:  # others die all the same
            failed.append(f"{region}: {error}")
            continue
        for id_, instance in seen.items():
            tags = {t["Key"]: t["Value"] for t in instance.get("Tags", [])}
            named = [region, id_] == canary and tags.get("drums:role") == "canary"
            if named and not TOKEN.fullmatch(instance.get("ClientToken", "")):
                found = instance["State"]["Name"] in ALIVE
                continue
            due = deadline(instance, tags, installation, longest)
            if due is None or due > now or instance["State"]["Name"] not in ALIVE:
                continue
            ended.append(f"{region} {id_}, due {due}")
            if shadow:
                continue
            try:
                end(ec2, id_)
            except Exception as error:
                failed.append(f"{region} {id_}: {error}")
    if found:
        tag = {"Key": "drums:swept", "Value": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
        client("ec2", canary[0]).create_tags(Resources=[canary[1]], Tags=[tag])
    else:
        failed.append(f"the canary {canary} was not found")
    print({"ended": ended, "failed": failed, "shadow": shadow})
    if failed:
        raise RuntimeError("; ".join(failed))
    return ended


def end(ec2, id_):
    try:
        ec2.terminate_instances(InstanceIds=[id_])
    except ec2.exceptions.ClientError as error:
        if error.response["Error"]["Code"] != "OperationNotPermitted":
            raise
        ec2.modify_instance_attribute(InstanceId=id_, DisableApiTermination={"Value": False})
        ec2.terminate_instances(InstanceIds=[id_])


def handler(event, context):
    settings = Config(retries={"mode": "standard", "total_max_attempts": 4}, connect_timeout=3, read_timeout=10)
    return sweep(
        lambda service, region: boto3.client(service, region_name=region, config=settings),
        os.environ["INSTALLATION"],
        os.environ["CANARY"].split(),
        datetime.timedelta(hours=float(os.environ["LONGEST_LIFE_HOURS"])),
        os.environ["SHADOW"] == "yes",
        datetime.datetime.now(datetime.timezone.utc),
    )
