"""Instances with a guest: QEMU boots the image of a server (`cargo xtask image server`) with the user data of the launch.

    launched ─▶ guest runs ──(powers itself off)──▶ as the instance's shutdown behaviour says
                   └──(TerminateInstances, StopInstances)──▶ its power is taken away, at once

What a guest does is QEMU's event, never a word of its own. Its clock is the cloud's at its start and runs with the machine's,
so a cloud with guests has a clock that nobody sets. Without an image, which is how it begins, nothing is booted.
"""

import concurrent.futures
import datetime
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import threading

ANSWERS_IN_S = 30
# What is done to a guest from outside, as QEMU's monitor knows it.
ACTS = {
    "hang": ("stop", {}),  # not one instruction more
    "resume": ("cont", {}),
    "reset": ("system_reset", {}),
    "cut": ("set_link", {"name": "net0", "up": False}),
}


class Guests:
    def __init__(self, clock, powered_off, lost):
        self.image = None
        self.running = {}  # instance's id → Guest
        self._clock, self._powered_off, self._lost = clock, powered_off, lost
        # A guest dies with the thread that started it, and so with this process: one thread, which stays.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "guests")

    def use(self, folder):
        """Whatever is launched from now on boots what is in this folder; None: nothing."""
        if folder is not None and not (pathlib.Path(folder) / "server.json").is_file():
            raise ValueError(f"there is no image of a server in {folder}; make one with: cargo xtask image server --out {folder}")
        self.image = folder and pathlib.Path(folder)

    def start(self, instance_id, user_data):
        if self.image is not None:
            make = lambda: Guest(self.image, instance_id, user_data, self._clock.now(), self._over)  # noqa: E731
            self.running[instance_id] = self._starter.submit(make).result()

    def end(self, instance_id):
        if guest := self.running.pop(instance_id, None):
            guest.end()

    def close(self):
        """Of those that still run nothing is left behind."""
        for instance_id in list(self.running):
            self.end(instance_id)

    def act(self, instance_id, act):
        self.of(instance_id).ask(*ACTS[act])

    def of(self, instance_id):
        if instance_id not in self.running:
            raise ValueError(f"{instance_id} has no guest that runs; launch it with the setting server_image")
        return self.running[instance_id]

    def _over(self, instance_id, off):
        """On the thread of the guest's monitor, once: it powered itself off, or QEMU ended for whatever reason."""
        (self._powered_off if off else self._lost)(instance_id)


class Guest:
    def __init__(self, image, instance_id, user_data, now, over):
        self._id, self._over = instance_id, over
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="drums-emulated-guest-"))
        self._answers, self._answered = {}, threading.Condition()
        self._asked = 0
        self._ended = False
        try:
            self._process = self._start(image, user_data, now)
            self.ask("qmp_capabilities", {})
        except BaseException:
            self.end()
            raise

    def _start(self, image, user_data, now):
        seed = self._folder / "seed"
        seed.mkdir()
        (seed / "user-data").write_text(user_data)
        (seed / "meta-data").write_text(f"instance-id: {self._id}\nlocal-hostname: {self._id}\n")
        command_line = json.loads((image / "server.json").read_text())["command_line"]
        base = datetime.datetime.fromtimestamp(int(now), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
        # The monitor's end of a pair: there is nothing to wait for until somebody listens.
        ours, theirs = socket.socketpair()
        # As drums_infra::guest has it.
        command = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-machine", "q35,accel=tcg", "-cpu", "max"]
        command += ["-smp", "2", "-m", "768", "-nodefaults", "-no-user-config", "-display", "none"]
        command += ["-action", "shutdown=pause,panic=pause", "-rtc", f"base={base}"]
        command += ["-serial", f"file:{_plain(self._folder / 'console')}"]
        command += ["-kernel", image / "kernel", "-initrd", image / "initrd", "-append", command_line]
        command += ["-drive", f"file={_plain(image / 'disk.raw')},format=raw,if=virtio,snapshot=on"]
        vvfat = "file.driver=vvfat,file.label=CIDATA,file.rw=off,format=raw,if=virtio,read-only=on"
        command += ["-drive", f"{vvfat},file.dir={_plain(seed)}"]
        command += ["-netdev", "user,id=net0,ipv6=off", "-device", "virtio-net-pci,netdev=net0,romfile="]
        command += ["-device", "virtio-rng-pci"]
        command += ["-chardev", f"socket,id=monitor,fd={theirs.fileno()}", "-mon", "chardev=monitor,mode=control"]
        with open(self._folder / "errors", "wb") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, pass_fds=[theirs.fileno()]
            )
        theirs.close()
        self._monitor = ours.makefile("rwb")
        ours.close()
        threading.Thread(target=self._listen, daemon=True).start()
        return process

    def console(self):
        path = self._folder / "console"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pid(self):
        return self._process.pid

    def ask(self, command, arguments):
        """Comes back when QEMU has done it."""
        with self._answered:
            self._asked += 1
            number = self._asked
        self._monitor.write(json.dumps({"execute": command, "arguments": arguments, "id": number}).encode() + b"\n")
        self._monitor.flush()
        with self._answered:
            done = self._answered.wait_for(lambda: number in self._answers or self._ended, ANSWERS_IN_S)
            answer = self._answers.pop(number, None)
        if answer is None:
            why = "QEMU has ended" if done else f"QEMU did not answer within {ANSWERS_IN_S} s"
            said = (self._folder / "errors").read_text(errors="replace").strip()
            raise ValueError(f"{command} of the guest of {self._id}: {why}; it said: {said or 'nothing'}")
        if "error" in answer:
            raise ValueError(f"{command} of the guest of {self._id} is refused: {answer['error']['desc']}")

    def end(self):
        """Takes its power away; nothing of it is left."""
        self._ended = True
        if process := getattr(self, "_process", None):
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self):
        off = False
        try:
            for line in self._monitor:
                said = json.loads(line)
                if "id" in said:
                    with self._answered:
                        self._answers[said["id"]] = said
                        self._answered.notify_all()
                elif said.get("event") == "SHUTDOWN" and said["data"]["reason"] == "guest-shutdown":
                    off = True
                    break
        except (OSError, ValueError):
            # A line that was cut off: QEMU ended while it spoke.
            pass
        ended_by_us = self._ended
        # Nobody waits for an answer of one that is gone.
        with self._answered:
            self._ended = True
            self._answered.notify_all()
        if not ended_by_us:
            self._over(self._id, off)


def _plain(path):
    """As the value of an option of QEMU."""
    return os.fspath(path).replace(",", ",,")
