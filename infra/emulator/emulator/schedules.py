"""EventBridge Scheduler's one-time schedules, which moto keeps and never fires.

At its time a schedule calls its universal target `ec2:terminateInstances` as the role that it names, in its own region. A
call that fails is tried again once a minute as far as the retry policy goes (a refused one is not), and is then put into
the dead-letter queue, as the same role. A schedule that is done stays to be looked at, unless ActionAfterCompletion is DELETE.
"""

import datetime
import functools
import json
import re

from moto.ec2.models import ec2_backends
from moto.scheduler import models as moto_scheduler
from moto.scheduler.models import scheduler_backends
from moto.sqs.models import sqs_backends

from . import ACCOUNT, wire

TERMINATE = ":scheduler:::aws-sdk:ec2:terminateInstances"
RETRY_S = 60


class Denied(Exception):
    pass


class Schedules:
    def __init__(self, clock, permitted, record):
        """`permitted(role_arn, call)` says whether the role may; `record(entry)` puts a line into the journal."""
        self.clock, self.permitted, self.record = clock, permitted, record
        self.attempts = {}  # schedule → (the expression it was for, attempts made, when to try again or None)
        clock.sources.append(self)
        moto_scheduler.utcnow = clock.utcnow
        moto_scheduler.unix_time = clock.now

    def due(self, until):
        found = []
        for region, backend in scheduler_backends[ACCOUNT].items():
            for group in backend.schedule_groups.values():
                for schedule in group.schedules.values():
                    at = self._next(schedule)
                    if at is not None and at <= until:
                        found.append((at, functools.partial(self._fire, region, group, schedule, at)))
        return found

    def _next(self, schedule):
        match = re.fullmatch(r"at\((.+)\)", schedule.schedule_expression)
        if not match or schedule.state == "DISABLED":
            return None
        expression, _, again = self.attempts.get(schedule, (None, 0, None))
        if expression == schedule.schedule_expression:
            return again
        at = datetime.datetime.fromisoformat(match[1]).replace(tzinfo=datetime.UTC).timestamp()
        window = schedule.flexible_time_window or {}
        late = window.get("MaximumWindowInMinutes", 0) if window.get("Mode") == "FLEXIBLE" else 0
        return at + 60 * late

    def _fire(self, region, group, schedule, at):
        expression = schedule.schedule_expression
        made = self.attempts[schedule][1] if self.attempts.get(schedule, (None,))[0] == expression else 0
        entry = {"by": "scheduler", "service": "ec2", "action": "TerminateInstances", "region": region}
        entry["schedule"], entry["role"] = schedule.name, schedule.target["RoleArn"]
        again, failure = None, None
        try:
            entry["ids"] = self._terminate(region, schedule.target)
        except Exception as error:  # whatever the target answers is an outcome of the schedule
            failure = error
            entry["error"] = f"{type(error).__name__}: {error}"
            policy = schedule.target.get("RetryPolicy", {})
            younger = self.clock.now() + RETRY_S - at <= policy.get("MaximumEventAgeInSeconds", 86400)
            if not isinstance(error, Denied) and made < policy.get("MaximumRetryAttempts", 185) and younger:
                again = self.clock.now() + RETRY_S
        self.record(entry)
        self.attempts[schedule] = (expression, made + 1, again)
        if again is not None:
            return
        if failure is not None:
            self._dead_letter(region, schedule, failure)
        if schedule.action_after_completion == "DELETE":
            group.schedules.pop(schedule.name, None)

    def _terminate(self, region, target):
        if not target["Arn"].endswith(TERMINATE):
            raise ValueError(f"the emulator has no target {target['Arn']}")
        ids = json.loads(target["Input"])["InstanceIds"]
        params = {f"InstanceId.{number}": id_ for number, id_ in enumerate(ids, 1)}
        if not self.permitted(target["RoleArn"], wire.Call("ec2", "TerminateInstances", region, "", "ec2", params)):
            raise Denied(f"{target['RoleArn']} may not terminate {ids}")
        ec2_backends[ACCOUNT][region].terminate_instances(ids)
        return ids

    def _dead_letter(self, region, schedule, failure):
        queue = (schedule.target.get("DeadLetterConfig") or {}).get("Arn", "")
        # As the same role: one that is gone leaves no letter either.
        call = wire.Call("sqs", "SendMessage", region, "", "query", {"QueueUrl": "/" + queue.rpartition(":")[2]})
        if not queue or not self.permitted(schedule.target["RoleArn"], call):
            return
        attributes = {
            "ERROR_CODE": {"DataType": "String", "StringValue": type(failure).__name__},
            "ERROR_MESSAGE": {"DataType": "String", "StringValue": str(failure)},
        }
        name, queues = queue.rpartition(":")[2], sqs_backends[ACCOUNT][region]
        if name in queues.queues:
            queues.send_message(name, schedule.target["Input"], message_attributes=attributes)
