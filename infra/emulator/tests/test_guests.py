"""Instances with guests that boot. On the machine's own clock: theirs runs with it."""

import glob
import os
import pathlib
import tempfile
import time
import unittest

from .peer import PeerCase

IMAGE = os.environ.get("DRUMS_SERVER_IMAGE")
PATIENCE_S = 240
POWER_OFF = "#cloud-boothook\n#!/bin/sh\npoweroff -f\n"


class Guests(PeerCase):
    @classmethod
    def setUpClass(cls):
        # After the emulator's end, which is asked for last.
        cls.addClassCleanup(cls._nothing_is_left, cls._folders())
        super().setUpClass()

    @staticmethod
    def _folders():
        return set(glob.glob(f"{tempfile.gettempdir()}/drums-emulated-guest-*"))

    @classmethod
    def _nothing_is_left(cls, before):
        assert cls._folders() <= before, "a guest's folder is left"

    def until(self, what, holds):
        """There is no event of the emulator's to wait for: it is asked again."""
        end = time.monotonic() + PATIENCE_S
        while not (found := holds()):
            self.assertLess(time.monotonic(), end, f"not seen within {PATIENCE_S} s: {what}")
            time.sleep(0.2)
        return found

    def console(self, instance_id):
        return self.control("GET", f"console?instance={instance_id}")

    def guests_acts(self, instance_id):
        return [e["action"] for e in self.control("GET", "journal") if e.get("ids") == [instance_id]]

    def test_a_folder_without_an_image_is_refused_and_nothing_is_booted_by_itself(self):
        with self.assertRaisesRegex(ValueError, "no image of a server.*cargo xtask image server"):
            self.control("POST", "settings", {"server_image": "/nowhere"})
        id_ = self.launch(self.client("ec2"))
        for ask in (lambda: self.console(id_), lambda: self.control("POST", "guest", {"instance": id_, "event": "hang"})):
            with self.assertRaisesRegex(ValueError, "has no guest that runs"):
                ask()

    @unittest.skipUnless(IMAGE, "DRUMS_SERVER_IMAGE names no image of a server")
    def test_a_guest_ends_its_instance_and_an_instance_its_guest(self):
        ec2 = self.client("ec2")
        self.control("POST", "settings", {"server_image": IMAGE, "seconds": {"shutting-down": None}})
        self.addCleanup(self.control, "POST", "settings", {"server_image": None})
        # A kernel that hangs says nothing more, whatever it was told to do, and is paid for until it is terminated.
        hangs = self.launch(ec2, UserData=POWER_OFF, InstanceInitiatedShutdownBehavior="terminate")
        self.until("a kernel that starts", lambda: "Linux version" in self.console(hangs)["text"])
        self.control("POST", "guest", {"instance": hangs, "event": "hang"})
        said, qemu = self.console(hangs)["text"], pathlib.Path(f"/proc/{self.console(hangs)['pid']}")

        # Meanwhile another one boots, and does what its user data say.
        dies = self.launch(ec2, UserData=POWER_OFF, InstanceInitiatedShutdownBehavior="terminate")
        self.until("a guest that is off", lambda: self.state(dies) != "running")
        (seen,) = [i for i in self.control("GET", "instances") if i["id"] == dies]
        self.assertEqual((seen["state"], seen["reason"]), ("shutting-down", "Client.InstanceInitiatedShutdown"))
        self.assertEqual(self.guests_acts(dies), ["poweroff"])

        self.assertEqual((self.state(hangs), self.console(hangs)["text"]), ("running", said))
        self.assertTrue(qemu.exists())
        ec2.terminate_instances(InstanceIds=[hangs])
        self.assertFalse(qemu.exists(), "its power is away although it is shown as shutting-down for ever")
        self.assertEqual((self.state(hangs), self.guests_acts(hangs)), ("shutting-down", ["hang"]))

    @unittest.skipUnless(IMAGE, "DRUMS_SERVER_IMAGE names no image of a server")
    def test_a_guest_that_is_lost_is_told_and_still_paid_for(self):
        self.control("POST", "settings", {"server_image": IMAGE})
        self.addCleanup(self.control, "POST", "settings", {"server_image": None})
        id_ = self.launch(self.client("ec2"), UserData=POWER_OFF)
        os.kill(self.console(id_)["pid"], 9)
        self.until("its loss in the journal", lambda: self.guests_acts(id_))
        self.assertEqual((self.guests_acts(id_), self.state(id_)), (["lost"], "running"))
        self.client("ec2").terminate_instances(InstanceIds=[id_])
        self.assertEqual(self.state(id_), "terminated")
        # One that still runs at the end.
        self.launch(self.client("ec2"), UserData=POWER_OFF)
