"""The tests' side of the emulator, under /_emulator: JSON in, JSON out.

    GET  journal?since=N     the calls so far, from number N on
    POST faults              one fault (see faults.py); DELETE takes all back
    GET  clock               {"now": seconds since 1970}
    POST clock               {"now": S} or {"advance_s": S}: sets it; what is due by then has happened when this returns
    POST settings            {"seconds": {"shutting-down": null}}, {"prices": {"us-east-1": {"c8i.large": "0.09"}}}, {"quotas": {...}}
    POST settings            {"server_image": FOLDER}: what is launched from now on boots it (see guests.py); null: nothing is
    GET  console?instance=I  {"pid": QEMU's, "text": what its guest said so far}
    GET  network?region=R    {"subnets": [[id, zone], ...], "security_group": id}: what every account has at first
    POST role                {"profile": NAME}: a role and an instance profile of that name, as the stack makes them
    GET  instances           each one in every region, as it is
    POST guest               {"instance": "i-...", "event": "poweroff"}: what the guest does to its machine, where there is none;
                             "hang", "resume", "reset", "cut": what is done to one that was booted
    POST edit                {"instance": "i-...", "disable_api_stop": true, "tags": {...}}: by someone (see attributes.py)
    POST principals          {"AKIA...": {"policy": "coordinator", "tags": {}, "state": "revoked"}}; null forgets one
    GET  grants              of each policy what it allows, and what of it was not used
"""

import json
from urllib.parse import parse_qs

from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends

from . import ACCOUNT, attributes, guests, wire

PREFIX = "/_emulator/"


def answer(emulator, environ, body):
    name = environ["PATH_INFO"].removeprefix(PREFIX)
    query = parse_qs(environ.get("QUERY_STRING", ""))
    act = {
        ("GET", "journal"): lambda _: emulator.journal.entries[int(query.get("since", ["0"])[0]) :],
        ("POST", "faults"): emulator.faults.add,
        ("DELETE", "faults"): lambda _: emulator.faults.waiting.clear(),
        ("GET", "clock"): lambda _: {"now": emulator.clock.now()},
        ("POST", "clock"): lambda asked: _set_clock(emulator.clock, asked),
        ("POST", "settings"): lambda asked: _set(emulator, asked),
        ("GET", "console"): lambda _: _console(emulator.guests.of(query["instance"][0])),
        ("GET", "network"): lambda _: _network(query["region"][0]),
        ("GET", "instances"): lambda _: emulator.machines.shown(),
        ("POST", "role"): lambda asked: _role(asked["profile"]),
        ("POST", "guest"): lambda asked: _guest(emulator, asked),
        ("POST", "edit"): lambda asked: _edit(emulator, asked),
        ("POST", "principals"): lambda asked: [emulator.iam.set(name, to) for name, to in asked.items()],
        ("GET", "grants"): lambda _: emulator.iam.grants(),
    }.get((environ["REQUEST_METHOD"], name))
    if act is None:
        return _json(404, {"error": f"the emulator has no {environ['REQUEST_METHOD']} {name}; see control.py"})
    try:
        return _json(200, act(json.loads(body) if body else None))
    except (KeyError, TypeError, ValueError) as error:
        return _json(400, {"error": f"{name}: {type(error).__name__}: {error}"})


def _set_clock(clock, asked):
    clock.set(asked["now"] if "now" in asked else clock.now() + asked["advance_s"])
    return {"now": clock.now()}


def _set(emulator, asked):
    known = {"seconds", "prices", "quotas", "server_image"}
    unknown = set(asked) - known | set(asked.get("seconds", {})) - set(emulator.machines.seconds)
    if unknown:
        raise ValueError(f"there is no setting {', '.join(sorted(unknown))}")
    emulator.machines.seconds |= asked.get("seconds", {})
    if "server_image" in asked:
        emulator.guests.use(asked["server_image"])
    emulator.quotas.limits |= asked.get("quotas", {})
    for region, prices in asked.get("prices", {}).items():
        emulator.pricing.prices[region] = prices


def _network(region):
    ec2 = ec2_backends[ACCOUNT][region]
    vpc = ec2.get_default_vpc()
    subnets = sorted((s.id, s.availability_zone) for s in ec2.describe_subnets() if s.vpc_id == vpc.id)
    group = ec2.get_security_group_from_name("default", vpc.id)
    return {"subnets": sorted(subnets, key=lambda s: s[1]), "security_group": group.id}


def _role(name):
    iam = iam_backends[ACCOUNT]["aws"]
    trust = '{"Version": "2012-10-17", "Statement": []}'
    iam.create_role(name, trust, "/", None, "", [], 3600)
    iam.create_instance_profile(name, "/", [], [])
    iam.add_role_to_instance_profile(name, name)


def _guest(emulator, asked):
    instance, event = asked["instance"], asked["event"]
    if event in guests.ACTS:
        emulator.guests.act(instance, event)
        emulator.journal.add({"by": "someone", "action": event, "ids": [instance]})
        return
    emulator.machines.guest(instance, event)
    emulator.journal.add({"by": "guest", "action": event, "ids": [instance]})


def _console(guest):
    return {"pid": guest.pid, "text": guest.console()}


def _edit(emulator, asked):
    edits = {key: value for key, value in asked.items() if key != "instance"}
    attributes.someone(emulator.machines.find(asked["instance"]), edits)
    emulator.journal.add({"by": "someone", "action": "edit", "ids": [asked["instance"]], "params": edits})


def _json(status, said):
    return wire.Answer(status, [("Content-Type", "application/json")], json.dumps(said).encode())
