"""The tests' side of the emulator, under /_emulator: JSON in, JSON out.

    GET  journal?since=N     the calls so far, from number N on
    POST faults              one fault (see faults.py); DELETE takes all back
    GET  clock               {"now": seconds since 1970}
    POST clock               {"now": S} or {"advance_s": S}: sets it; what is due by then has happened when this returns
    POST settings            {"seconds": {"shutting-down": null}}, {"prices": {"us-east-1": {"c8i.large": "0.09"}}}, {"quotas": {...}}
    GET  instances           each one in every region, as it is
    POST guest               {"instance": "i-...", "event": "poweroff"}: what the guest does to its machine
    POST principals          {"AKIA...": {"policy": "coordinator", "tags": {}, "state": "revoked"}}; null forgets one
    GET  grants              of each policy what it allows, and what of it was not used
"""

import json
from urllib.parse import parse_qs

from . import wire

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
        ("GET", "instances"): lambda _: emulator.machines.shown(),
        ("POST", "guest"): lambda asked: _guest(emulator, asked),
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
    unknown = set(asked) - {"seconds", "prices", "quotas"} | set(asked.get("seconds", {})) - set(emulator.machines.seconds)
    if unknown:
        raise ValueError(f"there is no setting {', '.join(sorted(unknown))}")
    emulator.machines.seconds |= asked.get("seconds", {})
    emulator.quotas.limits |= asked.get("quotas", {})
    for region, prices in asked.get("prices", {}).items():
        emulator.pricing.prices[region] = prices


def _guest(emulator, asked):
    emulator.machines.guest(asked["instance"], asked["event"])
    emulator.journal.add({"by": "guest", "action": asked["event"], "ids": [asked["instance"]]})


def _json(status, said):
    return wire.Answer(status, [("Content-Type", "application/json")], json.dumps(said).encode())
