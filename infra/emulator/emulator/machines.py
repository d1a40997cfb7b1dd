"""Instances beyond moto's: client tokens, CpuOptions, states that take time or hang, guests that switch themselves off.

    pending ──▶ running ──▶ stopping ──▶ stopped
       └───────────┴─▶ shutting-down ──▶ terminated ──▶ forgotten after an hour

How long a state takes is set by the tests, in seconds of the clock; null is for ever, as EC2 users have seen it.
"""

import base64
import copy
import fnmatch
import functools
import hashlib
import json
import re
import threading

from moto.ec2 import utils as moto_utils
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends, elastic_block_store
from moto.ec2.models import instances as moto_instances
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend
from moto.ec2.models.instance_types import INSTANCE_TYPES, INSTANCE_TYPE_OFFERINGS, InstanceType
from moto.ec2.models.instances import Instance, InstanceBackend, InstanceState, StateReason

from . import ACCOUNT, attributes, wire
from .iam import profile_asked

FORGOTTEN_AFTER_S = 3600
USER_DATA_BYTES = 16384
REGIONS = ("eu-central-1", "us-east-1", "us-west-2")  # which the account has enabled


class Machines:
    def __init__(self, clock):
        self.clock = clock
        self.seconds = {"pending": 0, "stopping": 0, "shutting-down": 0}
        self.tokens = {}
        self.changes = {}  # instance → (when, what happens then)
        self.guests = None  # set by the emulator, which knows what their ends mean
        self._call = threading.local()
        clock.sources.append(self)
        self._install()

    # What moto's classes do differently here.

    def _install(self):
        machines, run, end, stop = self, InstanceBackend.run_instances, Instance.terminate, Instance.stop

        @functools.wraps(run)
        def run_instances(backend, *args, **kwargs):
            reservation = run(backend, *args, **kwargs)
            for instance in reservation.instances:
                instance.cpu_options = getattr(machines._call, "cpu_options", None)
                attributes.as_launched(instance, getattr(machines._call, "params", {}))
                machines._enter(instance, "pending", 0, lambda i=instance: i.start())
                machines.guests.start(instance.id, _text(instance.user_data))
            return reservation

        def terminate(instance):
            before = copy.copy(instance._state)
            if instance.state not in ("shutting-down", "terminated"):
                instance.state_reason = StateReason("User initiated shutdown", "Client.UserInitiatedShutdown")
                machines._enter(instance, "shutting-down", 32, lambda: machines._gone(instance, end))
            return before

        def stop_in_time(instance):
            before = copy.copy(instance._state)
            machines._enter(instance, "stopping", 64, lambda: stop(instance))
            return before

        attributes.install()
        InstanceBackend.run_instances = run_instances
        Instance.terminate, Instance.stop = terminate, stop_in_time
        moto_utils.filter_dict_attribute_mapping["client-token"] = "client_token"
        moto_utils.instance_value_in_filter_values = _fits
        InstanceType._filter_attributes["processor-info.supported-features"] = ["ProcessorInfo", "SupportedFeatures"]
        RegionsAndZonesBackend.regions = [r for r in RegionsAndZonesBackend.regions if r.name in REGIONS]
        moto_instances.utcnow = elastic_block_store.utcnow = self.clock.utcnow

    def _enter(self, instance, state, code, then):
        """Into a state that ends after its seconds; at once if they are none."""
        instance._state = InstanceState(state, code)
        if state != "pending":
            # However long it stays in that state: nobody in it runs any more.
            self.guests.end(instance.id)
        seconds = self.seconds[state]
        if seconds == 0:
            self.changes.pop(instance, None)
            then()
        else:
            self.changes[instance] = (None if seconds is None else self.clock.now() + seconds, then)

    def _gone(self, instance, end):
        reason = instance.state_reason
        end(instance)
        instance.state_reason = reason
        instance.terminated_at = self.clock.now()
        self.changes[instance] = (self.clock.now() + FORGOTTEN_AFTER_S, lambda: self._forget(instance))

    @staticmethod
    def _forget(instance):
        for reservation in instance.ec2_backend.reservations.values():
            reservation.instances = [i for i in reservation.instances if i is not instance]

    def due(self, until):
        def act(instance, then):
            self.changes.pop(instance)
            then()

        return [
            (at, functools.partial(act, instance, then))
            for instance, (at, then) in self.changes.items()
            if at is not None and at <= until
        ]

    # RunInstances.

    def run(self, call, forward):
        if refused := self._refused(call):
            return wire.error(call, *refused)
        self._call.cpu_options, self._call.params = self._cpu_options(call), call.params
        token = call.params.get("ClientToken")
        if not token or call.dry_run:
            return forward()
        asked = {key: value for key, value in call.params.items() if key != "ClientToken"}
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        key = (call.region, token)
        if key not in self.tokens:
            answer = forward()
            if answer.status == 200:
                self.tokens[key] = (digest, answer)
            return answer
        first, answer = self.tokens[key]
        if first != digest:
            text = "Arguments on this idempotent request are inconsistent with arguments used in previous request(s)."
            return wire.error(call, "IdempotentParameterMismatch", text, 400)
        return wire.Answer(answer.status, answer.headers, self._as_it_is_now(call, answer.body))

    def _as_it_is_now(self, call, body):
        """The first answer with the state that the instance has by now; one that is forgotten was terminated."""
        found = re.search(rb"<instanceId>(i-[0-9a-f]+)</instanceId>", body)
        try:
            state = ec2_backends[ACCOUNT][call.region].get_instance(found[1].decode())._state
        except EC2ClientError:
            state = InstanceState("terminated", 48)
        now = f"<instanceState><code>{state.code}</code><name>{state.name}</name></instanceState>".encode()
        return re.sub(rb"<instanceState>.*?</instanceState>", now, body, flags=re.S)

    def _refused(self, call):
        kind = call.params.get("InstanceType", "")
        offered = {offer["InstanceType"] for offer in INSTANCE_TYPE_OFFERINGS["region"].get(call.region, [])}
        if kind not in INSTANCE_TYPES or kind not in offered:
            return "InvalidParameterValue", f"Invalid value '{kind}' for InstanceType.", 400
        if call.params.get("CpuOptions.NestedVirtualization") == "enabled":
            if "nested-virtualization" not in features(kind):
                return "UnsupportedOperation", f"Nested virtualization is not supported on {kind}.", 400
            if call.params.get("InstanceMarketOptions.MarketType") == "spot":
                return "UnsupportedOperation", "Nested virtualization is not supported with spot instances.", 400
        if len(base64.b64decode(call.params.get("UserData", ""))) > USER_DATA_BYTES:
            return "InvalidParameterValue", f"User data is limited to {USER_DATA_BYTES} bytes", 400
        name, known = profile_asked(call.params)
        if name is not None and known is None:
            text = f"Value ({name}) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
            return "InvalidParameterValue", text, 400
        return None

    @staticmethod
    def _cpu_options(call):
        """As EC2 shows them: the type's own, and what was asked for."""
        processors = INSTANCE_TYPES[call.params["InstanceType"]].get("VCpuInfo", {})
        asked = {key.removeprefix("CpuOptions."): v for key, v in call.params.items() if key.startswith("CpuOptions.")}
        return {
            "CoreCount": int(asked.pop("CoreCount", processors.get("DefaultCores", 1))),
            "ThreadsPerCore": int(asked.pop("ThreadsPerCore", processors.get("DefaultThreadsPerCore", 1))),
        } | asked

    # The guest's side, and the tests'.

    def guest(self, instance_id, event):
        """What a guest does to its machine: `poweroff` ends it as its shutdown behaviour says, `halt` leaves it running."""
        instance = self.find(instance_id)
        if event == "poweroff" and instance.state in ("pending", "running"):
            if instance.instance_initiated_shutdown_behavior == "terminate":
                instance.terminate()
                instance.state_reason = StateReason("Instance initiated shutdown", "Client.InstanceInitiatedShutdown")
            else:
                instance.stop()
        elif event not in ("poweroff", "halt"):
            raise ValueError(f"no guest does {event!r}: it is poweroff or halt")

    def find(self, instance_id):
        for _, instance in everywhere():
            if instance.id == instance_id:
                return instance
        raise ValueError(f"there is no instance {instance_id}")

    def shown(self):
        """Every instance in every region, as it is and not as an API would show it."""
        return [
            {
                "id": i.id,
                "region": region,
                "state": i.state,
                "reason": i.state_reason.code if i.state_reason else "",
                "terminated_at": getattr(i, "terminated_at", None),
                "type": i.instance_type,
                "launched_at": i.launch_time.replace(tzinfo=None).isoformat() + "Z",
                "client_token": i.client_token,
                "tags": {tag["key"]: tag["value"] for tag in i.get_tags()},
                "user_data": _text(i.user_data),
                "shutdown_behavior": i.instance_initiated_shutdown_behavior,
                "protected": i.disable_api_termination,
                "stop_protected": i.disable_api_stop,
                "profile": (i.iam_instance_profile or {}).get("Arn"),
                "http_tokens": i.metadata_options.http_tokens,
                "cpu_options": i.cpu_options,
                "subnet": i.subnet_id,
                "volumes": {
                    volume.volume_id: volume.delete_on_termination for _, volume in i.get_block_device_mapping
                },
            }
            for region, i in everywhere()
        ]


def _fits(have, wanted):
    """Filters of DescribeInstances as EC2 reads them, with * and ?."""
    values = have if isinstance(have, list) else [str(have).lower() if isinstance(have, bool) else have]
    return any(fnmatch.fnmatchcase(str(value), pattern) for value in values for pattern in wanted)


def everywhere():
    for region, backend in ec2_backends[ACCOUNT].items():
        for instance in backend.all_instances():
            yield region, instance


def features(instance_type):
    return (INSTANCE_TYPES.get(instance_type, {}).get("ProcessorInfo") or {}).get("SupportedFeatures") or []


def _text(user_data):
    if user_data is None:
        return ""
    raw = user_data if isinstance(user_data, bytes) else str(user_data).encode()
    try:
        return base64.b64decode(raw, validate=True).decode()
    except ValueError:
        return raw.decode()
