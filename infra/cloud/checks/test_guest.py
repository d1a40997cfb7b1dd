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

# Time passes by sleeping alone: each second slept is one on both clocks.
STUBS = {
    "date": 'echo $(($(cat "$T/wall") + $(cat "$T/slept")))',
    "systemctl": 'echo "$(cat "$T/slept") systemctl $*" >>"$T/did"; [ ! -e "$T/deaf" ] || exit 0\ncase "$*" in *poweroff) touch "$T/off";; esac',
    "systemd-run": 'echo "systemd-run $*" >>"$T/did"; [ ! -e "$T/no-systemd-run" ] || cat "$T/no-systemd-run"',
    "nohup": 'echo "nohup $*" >>"$T/did"',
    "sleep": 'slept=$(($(cat "$T/slept") + $1)); echo $slept >"$T/slept"; echo "$slept.00 0" >"$DRUMS_ROOT/proc/uptime"\n'
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
        for name in ("off", "deaf", "no-systemd-run"):
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

    def test_the_first_line_waits_for_no_service_manager_and_needs_none(self):
        # One that answers only once the script has gone on: early in a boot it waits for what waits for this line.
        os.mkfifo(self.root / "no-systemd-run")
        self.run_sh(self.first_line() + '\necho went on >>"$T/did"; : >"$T/no-systemd-run"; wait')
        self.assertIn("went on", self.did())
        self.assertIn(f"nohup sh -c sleep {LIFETIME}; poweroff -f", self.did())
        (line,) = [line for line in self.did() if line.startswith("systemd-run")]
        self.assertIn("--property=DefaultDependencies=no --timer-property=DefaultDependencies=no", line)

    def lives_s(self, wall=NOW):
        """How long it lived in this boot, by its own count, before it was told to power off."""
        (self.root / "etc/drums").mkdir(parents=True, exist_ok=True)
        (self.root / "etc/drums/deadline").write_text(f"DEADLINE_S={DEADLINE}\nLIFETIME_S={LIFETIME}\n")
        self.run_sh(f". {GUEST}/drums-deadline", wall)
        return int(self.did()[0].split()[0])

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
        for name in ("drums-deadline.service", "drums-fetch-agent.service"):
            text = (UNITS / name).read_text()
            unit = self.root / name
            unit.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", text))
            done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True)
            complaints = [line for line in done.stderr.splitlines() if name in line]
            self.assertEqual(complaints, [])
