"""AWS's protocols, as far as reading who calls what, and answering with an error, goes."""

import dataclasses
import json
import re
from urllib.parse import parse_qs, parse_qsl, unquote
from xml.sax.saxutils import escape

from . import cbor

SIGNED_AS = {"monitoring": "cloudwatch"}


@dataclasses.dataclass
class Call:
    service: str  # as policies name it
    action: str
    region: str
    key_id: str  # the access key's id: who calls
    protocol: str  # ec2, query, json, rest-json, rest-xml or cbor
    params: dict  # flat names with their text for ec2 and query, the body's fields else

    @property
    def dry_run(self):
        return self.params.get("DryRun") == "true"


@dataclasses.dataclass
class Answer:
    status: int
    headers: list
    body: bytes


def read(environ, body):
    """The call that a request makes; None if nobody signed it."""
    scope = re.search(r"Credential=([^,\s]+)", environ.get("HTTP_AUTHORIZATION", ""))
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    scope = scope[1] if scope else unquote(query.get("X-Amz-Credential", [""])[0])
    if scope.count("/") != 4:
        return None
    key_id, _, region, signed, _ = scope.split("/")
    service = SIGNED_AS.get(signed, signed)
    path, method = environ.get("PATH_INFO", ""), environ["REQUEST_METHOD"]
    call = lambda action, protocol, params: Call(service, action, region, key_id, protocol, params)  # noqa: E731
    if match := re.fullmatch(r"/service/[^/]+/operation/(\w+)", path):
        return call(match[1], "cbor", cbor.decode(body) if body else {})
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return call(target.rpartition(".")[2], "json", json.loads(body or b"{}"))
    if service == "scheduler":
        return call(*_schedules(method, path, query, body))
    if service != "s3" and "urlencoded" in environ.get("CONTENT_TYPE", ""):
        params = dict(parse_qsl(body.decode(), keep_blank_values=True))
        return call(params.get("Action", ""), "ec2" if service == "ec2" else "query", params)
    asked = {"Method": method, "Path": unquote(path), "Query": sorted(query)}
    # What a policy may ask of a write: that it is of an object which is not there yet.
    if "HTTP_IF_NONE_MATCH" in environ:
        asked["If-None-Match"] = environ["HTTP_IF_NONE_MATCH"]
    return call(f"{method} {path}", "rest-xml", asked)


def _schedules(method, path, query, body):
    kind, _, name = unquote(path).lstrip("/").partition("/")
    what = {"schedules": "Schedule", "schedule-groups": "ScheduleGroup"}.get(kind, kind)
    verb = {"POST": "Create", "PUT": "Update", "DELETE": "Delete", "GET": "Get" if name else "List"}.get(method, method)
    params = json.loads(body) if body else {}
    params |= {key[0].upper() + key[1:]: values[0] for key, values in query.items()}
    return f"{verb}{what}" + ("s" if verb == "List" else ""), "rest-json", params | ({"Name": name} if name else {})


def error(call, code, message, status):
    """The error as the service's own protocol says it."""
    if call.protocol == "ec2":
        text = f"<Errors><Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error></Errors>"
        return xml(status, f"<Response>{text}<RequestID>emulated</RequestID></Response>")
    if call.protocol == "query":
        text = f"<Error><Type>Sender</Type><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
        return xml(status, f"<ErrorResponse>{text}<RequestId>emulated</RequestId></ErrorResponse>")
    if call.protocol == "rest-xml":
        return xml(status, f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>")
    said = {"__type": code, "message": message, "Message": message}
    if call.protocol == "cbor":
        return in_cbor(status, said)
    kind = "application/json" if call.protocol == "rest-json" else "application/x-amz-json-1.1"
    return Answer(status, [("Content-Type", kind), ("x-amzn-errortype", code)], json.dumps(said).encode())


def xml(status, text):
    return Answer(status, [("Content-Type", "text/xml")], b'<?xml version="1.0" encoding="UTF-8"?>' + text.encode())


def in_json(said):
    return Answer(200, [("Content-Type", "application/x-amz-json-1.1")], json.dumps(said).encode())


def in_cbor(status, said):
    return Answer(status, [("Content-Type", "application/cbor"), ("smithy-protocol", "rpc-v2-cbor")], cbor.encode(said))


THROTTLES = {"ec2": ("RequestLimitExceeded", 503), "query": ("Throttling", 400), "rest-xml": ("SlowDown", 503)}


def throttle(call):
    """How this service says that it was asked too often: code and status."""
    return THROTTLES.get(call.protocol, ("ThrottlingException", 429 if call.protocol == "rest-json" else 400))
