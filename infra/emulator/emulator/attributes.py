"""What can be edited of an instance: its protections, its shutdown behaviour, its tags.

moto keeps what is edited as the text that came, ignores protection asked for by a launch, and takes an edit of the shutdown
behaviour for one of the security groups. In EC2 either protection forbids a termination, stop protection a stop, and neither
a shutdown from within. `someone` edits without a call: an owner of the account, whom no policy of ours binds.
"""

from moto.ec2.exceptions import OperationDisableApiStopNotPermitted, OperationNotPermitted4
from moto.ec2.models.instances import InstanceBackend
from moto.ec2.responses.instances import InstanceResponse

from . import wire

SWITCHES = ("disable_api_termination", "disable_api_stop")
BEHAVIOUR = "instance_initiated_shutdown_behavior"
BEHAVIOURS = ("stop", "terminate")


def install():
    edit, edited = InstanceBackend.modify_instance_attribute, InstanceResponse._dot_value_instance_attribute_handler
    stop_all, terminate_all = InstanceBackend.stop_instances, InstanceBackend.terminate_instances

    def modify_instance_attribute(backend, instance_id, key, value):
        return edit(backend, instance_id, key, _is_on(value) if key in SWITCHES else value)

    def dot_value_handler(response):
        behaviour = response._get_param("InstanceInitiatedShutdownBehavior.Value")
        if behaviour is None:
            return edited(response)
        response.error_on_dryrun()
        response.ec2_backend.modify_instance_attribute(response._get_param("InstanceId"), BEHAVIOUR, behaviour)
        return True

    def stop_instances(backend, instance_ids):
        for instance in backend.get_multi_instances_by_id(instance_ids):
            if instance.disable_api_stop:
                raise OperationDisableApiStopNotPermitted(instance.id)
        return stop_all(backend, instance_ids)

    def terminate_instances(backend, instance_ids):
        # As EC2: one that cannot be terminated, and none is.
        for instance in backend.get_multi_instances_by_id(instance_ids):
            if instance.disable_api_termination:
                raise OperationNotPermitted4(instance.id)
            if instance.disable_api_stop:
                raise OperationDisableApiStopNotPermitted(instance.id)
        return terminate_all(backend, instance_ids)

    InstanceBackend.modify_instance_attribute = modify_instance_attribute
    InstanceResponse._dot_value_instance_attribute_handler = dot_value_handler
    InstanceBackend.stop_instances, InstanceBackend.terminate_instances = stop_instances, terminate_instances


def as_launched(instance, params):
    """What the launch itself asked for."""
    instance.disable_api_termination = _is_on(params.get("DisableApiTermination"))
    instance.disable_api_stop = _is_on(params.get("DisableApiStop"))


def refused(call):
    """Why EC2 would not edit that; None if it would."""
    if call.action != "ModifyInstanceAttribute":
        return None
    behaviour = call.params.get("InstanceInitiatedShutdownBehavior.Value", "stop")
    if len(changed(call.params)) > 1:
        return wire.error(call, "InvalidParameterCombination", "Fields for multiple attribute types specified", 400)
    if behaviour not in BEHAVIOURS:
        text = f"Invalid value '{behaviour}' for InstanceInitiatedShutdownBehavior"
        return wire.error(call, "InvalidParameterValue", text, 400)
    return None


def changed(params):
    """The attributes that a ModifyInstanceAttribute names, as policies name them, with their new values."""
    found = {
        key.removesuffix(".Value"): value for key, value in params.items() if key.endswith(".Value") and key.count(".") == 1
    }
    if name := params.get("Attribute"):
        found[name[0].upper() + name[1:]] = params.get("Value", "")
    return found


def someone(instance, asked):
    """An edit by one whom no policy binds: {"disable_api_stop": true}, {"tags": {KEY: VALUE, or null to take it away}}, ..."""
    edits = dict(asked)
    tags = edits.pop("tags", {})
    if unknown := set(edits) - {*SWITCHES, BEHAVIOUR}:
        known = ", ".join(("tags", *SWITCHES, BEHAVIOUR))
        raise ValueError(f"nobody can edit {', '.join(sorted(unknown))}; known are {known}")
    if edits.get(BEHAVIOUR, "stop") not in BEHAVIOURS:
        raise ValueError(f"no shutdown behaviour is {edits[BEHAVIOUR]!r}; it is one of {', '.join(BEHAVIOURS)}")
    for key, value in edits.items():
        instance.ec2_backend.modify_instance_attribute(instance.id, key, value)
    for key, value in tags.items():
        if value is None:
            instance.ec2_backend.delete_tags([instance.id], {key: None})
        else:
            instance.ec2_backend.create_tags([instance.id], {key: value})


def _is_on(value):
    return str(value).lower() == "true"
