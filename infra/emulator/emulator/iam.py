"""Calls are checked against our own policies, as IAM would: what a policy does not allow is refused here too.

A test says which access key belongs to which policy, and with which principal tags. Keys that nobody named may do all: they
are the test's own. Which grants were used is remembered, so that a test can show that a policy grants nothing wider.

Known: Allow and Deny, wildcards, policy variables, the condition operators below. A condition that is not known is an error,
never a yes.
"""

import fnmatch
import json
import re

from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends

from . import ACCOUNT, attributes, wire

STATES = {
    "revoked": ("AuthFailure", "AWS was not able to validate the provided access credentials", 401),
    "expired": ("RequestExpired", "Request has expired.", 400),
}
STATES_IN_JSON = {
    "revoked": ("UnrecognizedClientException", "The security token included in the request is invalid.", 400),
    "expired": ("ExpiredTokenException", "The security token included in the request is expired", 400),
}


class Iam:
    def __init__(self, folder):
        self.policies = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        self.principals = {}  # access key id, or a role's name → {"policy" (one or several), "tags", "state"}
        self.used = set()

    def set(self, name, principal):
        if principal is None:
            self.principals.pop(name, None)
            return
        named = _list(principal.get("policy"))
        if unknown := [str(policy) for policy in named if policy not in self.policies]:
            raise ValueError(f"there is no policy {', '.join(unknown)}; there are {', '.join(self.policies)}")
        self.principals[name] = principal

    def refusal(self, call):
        """The answer to a call that its caller may not make; None if it may."""
        principal = self.principals.get(call.key_id)
        if principal is None:
            return None
        states = STATES if call.protocol in ("ec2", "query") else STATES_IN_JSON
        if state := principal.get("state"):
            return wire.error(call, *states[state])
        for action, resource, context in requests(call):
            if not self.allows(principal, action, resource, context):
                code, status = {"ec2": ("UnauthorizedOperation", 403), "json": ("AccessDeniedException", 400)}.get(
                    call.protocol, ("AccessDenied" if call.protocol == "query" else "AccessDeniedException", 403)
                )
                return wire.error(call, code, f"{call.key_id} may not {action} on {resource} with {context}", status)
        return None

    def role_may(self, role_arn, call):
        """Whether the role may make the call; one that nobody named is as good as not there."""
        principal = self.principals.get(role_arn.rpartition("/")[2])
        if principal is None or principal.get("state"):
            return False
        return all(self.allows(principal, *request) for request in requests(call))

    def allows(self, principal, action, resource, context):
        context = context | {f"aws:PrincipalTag/{key}": value for key, value in principal.get("tags", {}).items()}
        allowed = False
        for name in _list(principal["policy"]):
            for index, statement in enumerate(self.policies[name]["Statement"]):
                actions = [pattern for pattern in _list(statement["Action"]) if _like(action, pattern)]
                if not actions or not any(_like(resource, r, context) for r in _list(statement["Resource"])):
                    continue
                if not _meets(statement.get("Condition", {}), context):
                    continue
                if statement["Effect"] == "Deny":
                    return False
                allowed = True
                self.used |= {(name, index, pattern) for pattern in actions}
        return allowed

    def grants(self):
        """Of each policy: which actions it allows, by statement, and which of them no call has used so far."""
        granted = {
            name: {
                (statement.get("Sid", str(index)), index, action)
                for index, statement in enumerate(document["Statement"])
                if statement["Effect"] == "Allow"
                for action in _list(statement["Action"])
            }
            for name, document in self.policies.items()
        }
        return {
            name: {
                "granted": sorted(f"{sid}: {action}" for sid, _, action in all_of),
                "unused": sorted(f"{sid}: {action}" for sid, index, action in all_of if (name, index, action) not in self.used),
            }
            for name, all_of in granted.items()
        }


def requests(call):
    """What IAM is asked when the call is made: action, resource, context."""
    base = {"aws:RequestedRegion": call.region}
    arn = lambda service, rest, account=ACCOUNT: f"arn:aws:{service}:{call.region}:{account}:{rest}"  # noqa: E731
    if call.action == "GetCallerIdentity":
        return  # whoever has credentials may ask whose they are
    if call.service == "ec2":
        yield from _of_ec2(call, base | {"ec2:Region": call.region}, arn)
    elif call.service == "scheduler":
        group, name = call.params.get("GroupName", "default"), call.params.get("Name")
        one = name and call.action.endswith("Schedule")
        yield f"scheduler:{call.action}", arn("scheduler", f"schedule/{group}/{name}") if one else "*", base
        if role := call.params.get("Target", {}).get("RoleArn"):
            yield "iam:PassRole", role, base | {"iam:PassedToService": "scheduler.amazonaws.com"}
    elif call.service == "ssm":
        names = call.params.get("Names") or [call.params.get("Name", "*")]
        for name in names:
            account = "" if name.startswith("/aws/service/") else ACCOUNT
            yield f"ssm:{call.action}", arn("ssm", "parameter/" + name.lstrip("/"), account), base
    elif call.service == "sqs":
        yield f"sqs:{call.action}", arn("sqs", call.params.get("QueueUrl", "*").rpartition("/")[2]), base
    elif call.service == "s3":
        yield _of_s3(call, base)
    else:
        more = {"cloudwatch:namespace": call.params["Namespace"]} if "Namespace" in call.params else {}
        yield f"{call.service}:{call.action}", "*", base | more


def _of_ec2(call, base, arn):
    if call.action == "RunInstances":
        yield from _of_a_launch(call, base, arn)
        return
    ids = _numbered(call.params, "InstanceId") + _numbered(call.params, "ResourceId")
    changes = not call.action.startswith(("Describe", "Get"))
    if not changes or not ids:
        yield f"ec2:{call.action}", "*", base
        return
    new = {tag["Key"]: tag.get("Value", "") for tag in _groups(call.params, "Tag").values()}
    if call.action == "ModifyInstanceAttribute":
        for name, value in attributes.changed(call.params).items():
            base |= {"ec2:Attribute": name, f"ec2:Attribute/{name}": value}
    for id_ in ids:
        kind = {"i": "instance", "vol": "volume"}.get(id_.partition("-")[0], "*")
        context = base | {f"aws:ResourceTag/{key}": value for key, value in _tags_of(call.region, id_).items()}
        yield f"ec2:{call.action}", arn("ec2", f"{kind}/{id_}"), context | _profile_of(call.region, id_) | _requested(new)


def _of_s3(call, base):
    bucket, _, key = call.params["Path"].lstrip("/").partition("/")
    method, query = call.params["Method"], call.params["Query"]
    if not key:
        verb = {"GET": "List", "HEAD": "List", "PUT": "Create", "DELETE": "Delete"}.get(method, method.capitalize())
        return f"s3:{verb}Bucket", f"arn:aws:s3:::{bucket}", base
    in_parts = "uploads" in query or "uploadId" in query
    action = {
        ("GET", True): "s3:ListMultipartUploadParts",
        ("DELETE", True): "s3:AbortMultipartUpload",
    }.get((method, in_parts))
    verb = {"GET": "Get", "HEAD": "Get", "PUT": "Put", "POST": "Put", "DELETE": "Delete"}[method]
    version = "Version" if verb != "Put" and "versionId" in query else ""
    if verb == "Put":
        # Parts do not make the object, and take no such header; the call that completes them does.
        base |= {"s3:ObjectCreationOperation": str(method == "POST" and "uploadId" in query or not in_parts).lower()}
        if "If-None-Match" in call.params:
            base |= {"s3:if-none-match": call.params["If-None-Match"]}
    return action or f"s3:{verb}Object{version}", f"arn:aws:s3:::{bucket}/{key}", base


def _of_a_launch(call, base, arn):
    params = call.params
    tagged = {}
    for spec in _groups(params, "TagSpecification").values():
        pairs = _groups(spec, "Tag").values()
        tagged[spec["ResourceType"]] = {pair["Key"]: pair.get("Value", "") for pair in pairs}
    about = base | {
        "ec2:InstanceType": params.get("InstanceType", ""),
        "ec2:MetadataHttpTokens": params.get("MetadataOptions.HttpTokens", "optional"),
    }
    name, profile = profile_asked(params)
    of_profile = {"ec2:InstanceProfile": profile.arn} if profile else {}
    for kind in ("instance", "volume", "network-interface"):
        more = of_profile if kind == "instance" else {}
        yield "ec2:RunInstances", arn("ec2", f"{kind}/*"), about | more | _requested(tagged.get(kind, {}))
    for name, kind in (("SubnetId", "subnet"), ("SecurityGroupId", "security-group")):
        for key, value in params.items():
            if re.fullmatch(rf"(NetworkInterface\.\d+\.)?{name}(\.\d+)?", key):
                yield "ec2:RunInstances", arn("ec2", f"{kind}/{value}"), base
    yield "ec2:RunInstances", arn("ec2", f"image/{params.get('ImageId', '*')}", ""), base
    for kind, tags in tagged.items():
        made = base | {"ec2:CreateAction": "RunInstances"}
        yield "ec2:CreateTags", arn("ec2", f"{kind}/*"), made | _requested(tags)
    if name is not None:
        role = profile.roles[0].arn if profile and profile.roles else f"arn:aws:iam::{ACCOUNT}:role/{name}"
        yield "iam:PassRole", role, base | {"iam:PassedToService": "ec2.amazonaws.com"}


def _requested(tags):
    context = {f"aws:RequestTag/{key}": value for key, value in tags.items()}
    return context | ({"aws:TagKeys": sorted(tags)} if tags else {})


def profile_asked(params):
    """The name of the instance profile that a launch asks for, and the profile; None where there is none."""
    name = params.get("IamInstanceProfile.Name")
    arn = params.get("IamInstanceProfile.Arn")
    if name is None and arn is None:
        return None, None
    for known in iam_backends[ACCOUNT]["aws"].instance_profiles.values():
        if known.name == name or known.arn == arn:
            return known.name, known
    return name or arn.rpartition("/")[2], None


def _profile_of(region, id_):
    association = ec2_backends[ACCOUNT][region].iam_instance_profile_associations.get(id_)
    return {"ec2:InstanceProfile": association.iam_instance_profile.arn} if association else {}


def _tags_of(region, id_):
    return {tag["key"]: tag["value"] for tag in ec2_backends[ACCOUNT][region].describe_tags({"resource-id": [id_]})}


def _numbered(params, name):
    return [value for key, value in params.items() if re.fullmatch(rf"{name}(\.\d+)?", key)]


def _groups(params, name):
    """`Name.1.Rest: v` as {"1": {"Rest": v}}."""
    groups = {}
    for key, value in params.items():
        if match := re.fullmatch(rf"{name}\.(\d+)\.(.+)", key):
            groups.setdefault(match[1], {})[match[2]] = value
    return groups


def _list(value):
    return value if isinstance(value, list) else [value]


def _like(text, pattern, context=None):
    if context is not None:
        pattern = _filled(pattern, context)
    # fnmatch knows sets in brackets, policies do not.
    return pattern is not None and fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def _filled(pattern, context):
    """The pattern with its variables' values; None if the context has not all of them, for then nothing matches."""
    for variable in re.findall(r"\$\{([^}]+)\}", pattern):
        if variable not in context:
            return None
        pattern = pattern.replace(f"${{{variable}}}", context[variable])
    return pattern


def _meets(conditions, context):
    return all(
        _holds(operator, context.get(key), [_filled(str(w), context) for w in _list(wanted)])
        for operator, keys in conditions.items()
        for key, wanted in keys.items()
    )


def _holds(operator, have, wanted):
    name, of_each = operator, None
    if ":" in name:
        of_each, _, name = name.partition(":")
    if name == "Null":
        return (have is None) == (wanted[0] == "true")
    if name.endswith("IfExists"):
        if have is None:
            return True
        name = name.removesuffix("IfExists")
    negated = "Not" in name
    equal = {
        "StringEquals": lambda h, w: h == w,
        "StringEqualsIgnoreCase": lambda h, w: h.lower() == w.lower(),
        "StringLike": _like,
        "ArnEquals": _like,
        "ArnLike": _like,
        "Bool": lambda h, w: h.lower() == w.lower(),
    }[name.replace("Not", "")]
    if of_each is None:
        # A key that is absent equals nothing.
        found = have is not None and any(w is not None and equal(have, w) for w in wanted)
        return found != negated
    values = have or []
    found = [any(equal(value, w) for w in wanted) != negated for value in values]
    return {"ForAllValues": all, "ForAnyValue": any}[of_each](found)
