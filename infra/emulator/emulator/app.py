"""What a request goes through: journal, clock, faults, permission, and then moto or what stands in for it."""

import io
import socket
import threading
import time
from http import HTTPStatus

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from . import attributes, control, wire
from .clock import Clock
from .faults import Faults
from .guests import Guests
from .iam import Iam
from .machines import Machines
from .metrics import Metrics
from .pricing import Pricing
from .quotas import Quotas
from .schedules import Schedules


class Journal:
    """Every call in the order of arrival: who, what, with which parameters, and what was answered."""

    def __init__(self, clock):
        self.clock, self.entries = clock, []

    def add(self, entry):
        entry |= {"number": len(self.entries), "at": self.clock.now()}
        self.entries.append(entry)
        return entry


class Emulator:
    def __init__(self, policies, start=None):
        self.clock = Clock(start)
        self.journal = Journal(self.clock)
        self.faults = Faults()
        self.iam = Iam(policies)
        self.machines = Machines(self.clock)
        self.schedules = Schedules(self.clock, self.iam.role_may, self.journal.add)
        self.pricing, self.metrics, self.quotas = Pricing(), Metrics(self.clock), Quotas()
        self.machines.guests = self.guests = Guests(self.clock, self._powered_off, self._lost)
        self.lock = threading.RLock()
        self._moto = DomainDispatcherApplication(create_backend_app)

    def tick(self):
        with self.lock:
            self.clock.tick()

    # A guest's end, told on a thread of its own.

    def _powered_off(self, instance_id):
        with self.lock:
            self.journal.add({"by": "guest", "action": "poweroff", "ids": [instance_id]})
            self.machines.guest(instance_id, "poweroff")

    def _lost(self, instance_id):
        """To EC2 it is still running, as a host whose hardware failed."""
        with self.lock:
            self.journal.add({"by": "guest", "action": "lost", "ids": [instance_id]})

    def __call__(self, environ, start_response):
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ["PATH_INFO"].startswith(control.PREFIX):
            with self.lock:
                answer = control.answer(self, environ, body)
        else:
            answer = self._answer(environ, body)
        if answer is None:
            # The reply is lost: the caller sees a connection that ends, and so does the server.
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        # A HEAD's answer has the length of what it does not have.
        ours = ("date", "server") if environ["REQUEST_METHOD"] == "HEAD" else ("content-length", "date", "server")
        headers = [(k, v) for k, v in answer.headers if k.lower() not in ours]
        if not any(k.lower() == "content-length" for k, _ in headers):
            headers.append(("Content-Length", str(len(answer.body))))
        start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", headers)
        return [answer.body]

    def _answer(self, environ, body):
        call = wire.read(environ, body)
        if call is None:
            with self.lock:
                return self._forward(environ, body)
        with self.lock:
            self.clock.tick()
            fault = self.faults.take(call)
            entry = {"by": call.key_id, "service": call.service, "action": call.action, "region": call.region}
            entry = self.journal.add(entry | {"params": call.params})
            error = fault and fault.answer(call)
            carried_out = error is None or fault.after
            answer = self._carried_out(call, environ, body, fault and fault.twice) if carried_out else error
            entry["status"] = answer.status
            entry["answered"] = "nothing" if fault and fault.lose else (error or answer).status
        if fault and fault.delay_s:
            time.sleep(fault.delay_s)
        if fault and fault.lose:
            return None
        return error or answer

    def _carried_out(self, call, environ, body, twice):
        if refusal := self.iam.refusal(call):
            return refusal
        if twice:
            self._handle(call, environ, body)
        return self._handle(call, environ, body)

    def _handle(self, call, environ, body):
        if call.service == "ec2" and call.action == "RunInstances":
            return self.machines.run(call, lambda: self._forward(environ, body))
        if call.service == "ec2" and (refused := attributes.refused(call)):
            return refused
        if call.service == "pricing" and call.action == "GetProducts":
            return self.pricing.get_products(call)
        if call.service == "servicequotas" and call.action == "GetServiceQuota":
            return self.quotas.get(call)
        if call.protocol == "cbor":
            return self.metrics.answer(call)
        return self._forward(environ, body)

    def _forward(self, environ, body):
        said = {}

        def start_response(status, headers, exc_info=None):
            said.update(status=int(status.split()[0]), headers=headers)

        environ = environ | {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        answer = b"".join(self._moto(environ, start_response))
        return wire.Answer(said["status"], said["headers"], answer)
