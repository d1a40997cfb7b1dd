"""What a test lets go wrong. A fault is asked for beforehand and used up by the calls that it fits.

    {"action": "RunInstances", "where": {"SubnetId": "subnet-1"}, "code": "InsufficientInstanceCapacity", "status": 500}

`service`, `action`, `region`, `key_id`, `where` (parameters by name): whom it hits; what is left out hits all.
`skip` (0), `count` (1, null: for ever): which of them.
`code`, `status` (400), `message`: the error that is answered; `throttle`: the service's own words for too many calls.
`after`: the call is carried out first, and then answered so. `lose`: carried out, and the connection closed unanswered.
`twice`: carried out two times, as a repeated packet would; the second answer is sent.
`delay_s`: real seconds before the answer, of a call that was carried out unless `code` says otherwise.
"""

import dataclasses

from . import wire


@dataclasses.dataclass
class Fault:
    service: str | None = None
    action: str | None = None
    region: str | None = None
    key_id: str | None = None
    where: dict = dataclasses.field(default_factory=dict)
    skip: int = 0
    count: int | None = 1
    code: str | None = None
    status: int = 400
    message: str = "injected"
    throttle: bool = False
    after: bool = False
    lose: bool = False
    twice: bool = False
    delay_s: float = 0

    def fits(self, call):
        asked = {name: getattr(self, name) for name in ("service", "action", "region", "key_id")}
        return all(want in (None, getattr(call, name)) for name, want in asked.items()) and all(
            str(call.params.get(name)) == want for name, want in self.where.items()
        )

    def answer(self, call):
        """The error to answer with; None if the call's own answer stands."""
        if self.throttle:
            code, status = wire.throttle(call)
            return wire.error(call, code, "Request limit exceeded.", status)
        return wire.error(call, self.code, self.message, self.status) if self.code else None


class Faults:
    def __init__(self):
        self.waiting = []

    def add(self, fault):
        self.waiting.append(Fault(**fault))

    def take(self, call):
        """The first fault for this call; it is used up by one."""
        for fault in self.waiting:
            if fault.count == 0 or not fault.fits(call):
                continue
            if fault.skip > 0:
                fault.skip -= 1
                continue
            if fault.count is not None:
                fault.count -= 1
            return fault
        return None
