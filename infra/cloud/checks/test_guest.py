"""The guest's scripts with a clock, a service manager and a /proc of the test's own."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parents[1]
GUEST, UNITS = HERE / "guest", HERE.parent / "units"
NOW, LIFETIME = 1_796_000_000, 600
DEADLINE = NOW + LIFETIME

# Time passes by sleeping alone: each second slept is one on both clocks. What runs in the background reads it meanwhile.
STUBS = {
    "date": 'echo $(($(cat "$T/wall") + $(cat "$T/slept")))',
    "systemctl": 'echo "$(cat "$T/slept") systemctl $*" >>"$T/did"; [ ! -e "$T/deaf" ] || exit 0\ncase "$*" in *poweroff) touch "$T/off";; esac',
    "systemd-run": 'echo "systemd-run $*" >>"$T/did"; [ ! -e "$T/no-systemd-run" ] || cat "$T/no-systemd-run"',
    "nohup": 'echo "nohup $*" >>"$T/did"',
    # One that hangs is given up when it said, which takes that long.
    "timeout": 'shift 2; give_up=$1; shift; if [ -e "$T/hangs" ]; then echo "$(cat "$T/slept") hung: $*" >>"$T/did"\n'
    'echo $(($(cat "$T/slept") + give_up)) >"$T/slept.new"; mv "$T/slept.new" "$T/slept"; else "$@"; fi',
    "cat": '[ ! -e "$T/full" ] || [ $# -gt 0 ] || exit 1\nexec /bin/cat "$@"',
    "sleep": 'slept=$(($(cat "$T/slept") + $1)); echo $slept >"$T/slept.new"; mv "$T/slept.new" "$T/slept"; echo "$slept.00 0" >"$DRUMS_ROOT/proc/uptime"\n'
    '[ ! -e "$T/off" ] || kill -9 $PPID\n[ $slept -lt 100000 ] || kill -9 $PPID',
}


class Guest(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        (self.root / "bin").mkdir()
        for name, body in STUBS.items():
            (self.root / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
            (self.root / "bin" / name).chmod(0o755)
        self.boot("first")

    def boot(self, id_):
        boot_id = self.root / "proc/sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True, exist_ok=True)
        boot_id.write_text(id_ + "\n")
        (self.root / "proc/uptime").write_text("3.00 0\n")
        for name, text in (("slept", "0"), ("did", "")):
            (self.root / name).write_text(text)
        for name in ("off", "deaf", "hangs", "full", "no-systemd-run"):
            (self.root / name).unlink(missing_ok=True)

    def run_sh(self, script, wall=NOW):
        (self.root / "wall").write_text(str(wall))
        env = {"PATH": f"{self.root}/bin:/usr/bin:/bin", "T": str(self.root), "DRUMS_ROOT": str(self.root)}
        # A machine that is off: the shell that ran on it is gone.
        return subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=120)

    def did(self):
        return (self.root / "did").read_text().splitlines()

    def first_line(self):
        text = (GUEST / "user-data.sh").read_text().splitlines()
        self.assertEqual(text[:2], ["#cloud-boothook", "#!/bin/sh"])
        return text[2].replace("@DEADLINE_S@", str(DEADLINE)).replace("@LIFETIME_S@", str(LIFETIME))

    def armed_s(self, wall):
        self.boot("first")
        self.run_sh(self.first_line() + "\nwait", wall)
        (line,) = [line for line in self.did() if line.startswith("systemd-run")]
        self.assertRegex(line, "poweroff")
        return int(re.search(r"--on-active=(\d+)", line)[1])

    def test_the_first_line_arms_the_timer_whatever_the_clock_says(self):
        year = 365 * 86400
        self.assertEqual(self.armed_s(NOW), LIFETIME)
        self.assertEqual(self.armed_s(NOW + 300), LIFETIME - 300, "armed again by a boot in the middle")
        self.assertEqual(self.armed_s(NOW - 10 * year), LIFETIME, "a clock that is years behind")
        self.assertEqual(self.armed_s(DEADLINE + 5), 1, "a boot after the deadline")
        (self.root / "bin/date").write_text("#!/bin/sh\nexit 127\n")
        self.assertEqual(self.armed_s(NOW), LIFETIME, "a machine that cannot tell the time")

    def test_the_first_line_waits_for_no_service_manager_and_needs_none(self):
        # One that answers only once the script has gone on: early in a boot it waits for what waits for this line.
        os.mkfifo(self.root / "no-systemd-run")
        self.run_sh(self.first_line() + '\necho went on >>"$T/did"; : >"$T/no-systemd-run"; wait')
        self.assertIn("went on", self.did())
        self.assertIn(f"nohup sh -c sleep {LIFETIME}; poweroff -f & sleep 60; echo o >/proc/sysrq-trigger", self.did())
        (line,) = [line for line in self.did() if line.startswith("systemd-run")]
        self.assertIn("--property=DefaultDependencies=no --timer-property=DefaultDependencies=no", line)

    def user_data(self):
        """As infra/provider/src/user_data.rs fills it in."""
        text = (GUEST / "user-data.sh").read_text()
        for name in re.findall("@FILE (.+?)@", text):
            path = (UNITS if name.endswith(".service") else GUEST) / name
            text = text.replace(f"@FILE {name}@", path.read_text().rstrip())
        values = {"DEADLINE_S": DEADLINE, "LIFETIME_S": LIFETIME, "AGENT_URL": "https://a/b?c", "AGENT_SHA256": "5" * 64}
        for name, value in (values | {"TOKEN": "t"}).items():
            text = text.replace(f"@{name}@", str(value))
        self.assertNotRegex(text, "@[A-Z0-9_]+@", "all is filled in")
        return text

    def test_each_boot_arms_again_and_what_it_puts_in_place_outlives_a_disk_that_is_full(self):
        for id_ in ("first", "second"):
            self.boot(id_)
            self.assertEqual(self.run_sh(self.user_data() + "\nwait", NOW + 60).returncode, 0)
            did = self.did()
            self.assertRegex(did[0] + did[1], f"--on-active={LIFETIME - 60}|sleep {LIFETIME - 60}")
            started = [line.split(maxsplit=1)[1] for line in did if "systemctl" in line and "poweroff" not in line]
            agent = "drums-fetch-agent.service drums-watchdog.service drums-agent.service"
            want = ["systemctl daemon-reload", "systemctl enable drums-deadline.service"]
            want += ["systemctl start --no-block drums-deadline.service", "systemctl daemon-reload"]
            want += [f"systemctl enable {agent}", f"systemctl start --no-block {agent}"]
            self.assertEqual(started, want)
        files = [path for part in ("etc", "usr/local/sbin") for path in (self.root / part).rglob("*") if path.is_file()]
        there = {path: path.read_bytes() for path in files}
        names = {path.name: path for path in there}
        self.assertEqual(there[names["drums-deadline.service"]].strip(), (UNITS / "drums-deadline.service").read_bytes().strip())
        self.assertEqual(there[names["drums-deadline"]].strip(), (GUEST / "drums-deadline").read_bytes().strip())
        self.assertTrue(names["drums-deadline"].stat().st_mode & 0o100, "it can be started")
        self.assertEqual(names["token"].stat().st_mode & 0o077, 0, "nobody else reads it")
        self.boot("third")
        (self.root / "full").touch()
        self.run_sh(self.user_data() + "\nwait", NOW + 120)
        self.assertEqual({path: path.read_bytes() for path in there}, there)
        self.assertEqual(sorted(p.name for p in (self.root / "etc").rglob("*.new")), [])
        # A boot without cloud-init: the unit runs what is there.
        self.boot("fourth")
        self.run_sh(f"exec sh {self.root}/usr/local/sbin/drums-deadline", DEADLINE)
        self.assertIn("0 systemctl --no-block poweroff", self.did())

    def lives_s(self, wall=NOW, told=f"DEADLINE_S={DEADLINE}\nLIFETIME_S={LIFETIME}\n"):
        """How long it lived in this boot, by its own count, before it was told to power off."""
        (self.root / "etc/drums").mkdir(parents=True, exist_ok=True)
        (self.root / "etc/drums/deadline").write_text(told)
        self.run_sh(f". {GUEST}/drums-deadline", wall)
        return int(self.did()[0].split()[0])

    def test_a_host_that_does_not_know_its_deadline_is_past_it(self):
        whole = f"DEADLINE_S={DEADLINE}\nLIFETIME_S={LIFETIME}\n"
        nothing, too_long = "DEADLINE_S=\nLIFETIME_S=\n", whole.replace("179", "9" * 20)
        for told in ("", whole[:18], whole[:25], nothing, too_long, whole.replace("6", "six"), "'"):
            self.boot("first")
            self.assertEqual(self.lives_s(told=told), 0, told)
        (self.root / "etc/drums/deadline").unlink()
        self.boot("first")
        self.run_sh(f". {GUEST}/drums-deadline")
        self.assertIn("0 systemctl --no-block poweroff", self.did())

    def test_a_disk_that_blocks_its_writers_holds_nothing_up(self):
        lived = self.root / "var/lib/drums/lived"
        lived.mkdir(parents=True)
        # Whoever opens it for writing waits for a reader, as a writer waits for a frozen filesystem.
        os.mkfifo(lived / ".new")
        self.assertIn(self.lives_s(), range(LIFETIME - 5, LIFETIME + 6))
        self.assertFalse((lived / "first").exists(), "it was blocked")
        # The one writer that waits goes away.
        os.close(os.open(lived / ".new", os.O_RDONLY | os.O_NONBLOCK))

    def test_it_is_off_at_its_deadline(self):
        self.assertIn(self.lives_s(), range(LIFETIME - 5, LIFETIME + 6))
        self.assertEqual(self.did()[0].split(maxsplit=1)[1], "systemctl --no-block poweroff")

    def test_a_clock_that_is_years_behind_extends_nothing_also_over_boots(self):
        self.assertIn(self.lives_s(NOW - 10**9), range(LIFETIME - 5, LIFETIME + 6))
        lived = self.root / "var/lib/drums/lived"
        for file in lived.iterdir():
            file.unlink()
        (lived / "earlier").write_text("400\n")
        self.boot("second")
        self.assertIn(self.lives_s(NOW - 10**9), range(LIFETIME - 400 - 5, LIFETIME - 400 + 6))

    def test_a_boot_after_the_deadline_ends_at_once(self):
        self.assertEqual(self.lives_s(DEADLINE + 1), 0)

    def test_what_blocks_a_shutdown_is_overcome_within_the_bound(self):
        (self.root / "deaf").touch()
        (self.root / "proc/sysrq-trigger").write_text("")
        at = self.lives_s()
        tried = [line.split(maxsplit=1) for line in self.did()]
        self.assertEqual(
            [what for _, what in tried],
            ["systemctl --no-block poweroff", "systemctl --no-block --force poweroff", "systemctl --force --force poweroff"],
        )
        self.assertEqual((self.root / "proc/sysrq-trigger").read_text(), "o\n")
        self.assertLess(int(tried[-1][0]) - at, 110)

    def test_a_service_manager_that_hangs_is_not_waited_for(self):
        (self.root / "deaf").touch()
        (self.root / "hangs").touch()
        (self.root / "proc/sysrq-trigger").write_text("")
        at = self.lives_s()
        self.assertEqual((self.root / "proc/sysrq-trigger").read_text(), "o\n")
        self.assertLess(int((self.root / "slept").read_text()) - at, 110)
        self.assertEqual(len([line for line in self.did() if "hung: systemctl" in line]), 2)

    def test_nothing_halts(self):
        for path in [*GUEST.iterdir(), UNITS / "drums-deadline.service"]:
            commands = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
            self.assertNotRegex(commands, r"\bhalt\b|shutdown -h", path.name)

    def test_only_the_agent_with_its_digest_is_put_in_place(self):
        (self.root / "etc/drums").mkdir(parents=True)
        (self.root / "usr/local/bin").mkdir(parents=True)
        curl = self.root / "bin/curl"
        agent = self.root / "usr/local/bin/drums-agent"
        digest = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"  # of hello and a line's end
        for wanted, is_there in (("0" * 64, False), (digest, True)):
            (self.root / "etc/drums/agent").write_text(f"AGENT_URL='http://127.0.0.1/a?b&c'\nAGENT_SHA256={wanted}\n")
            curl.write_text('#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\necho hello >"$2"\n')
            curl.chmod(0o755)
            done = self.run_sh(f". {GUEST}/drums-fetch-agent")
            self.assertEqual((done.returncode == 0, agent.exists()), (is_there, is_there), done.stderr)
        curl.write_text("#!/bin/sh\nexit 1\n")
        self.assertEqual(self.run_sh(f". {GUEST}/drums-fetch-agent").returncode, 0, "it is there already")

    def test_systemd_takes_the_units(self):
        analyze = shutil.which("systemd-analyze")
        if analyze is None:
            self.skipTest("there is no systemd-analyze")
        for path in sorted(UNITS.glob("*.service")):
            unit = self.root / path.name
            unit.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", path.read_text()))
            done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True)
            complaints = [line for line in done.stderr.splitlines() if path.name in line]
            self.assertEqual(complaints, [])

    def test_the_timer_runs_also_where_a_boot_failed(self):
        unit = (UNITS / "drums-deadline.service").read_text().splitlines()
        for line in ("DefaultDependencies=no", "IgnoreOnIsolate=yes", "WantedBy=sysinit.target rescue.target emergency.target"):
            self.assertIn(line, unit)
        # Neither a disk beside the root nor the network is waited for.
        ordered = [line for line in unit if line.startswith(("After=", "Requires=", "BindsTo="))]
        self.assertEqual(ordered, ["After=systemd-remount-fs.service"])
