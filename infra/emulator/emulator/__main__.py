"""`python -m emulator`: prints its address as one line of JSON once it answers, and serves on loopback until it is ended."""

import argparse
import json
import logging
import os
import pathlib
import sys
import threading
from email.utils import formatdate

# Read when moto is imported: what EC2 refuses, it refuses too; and a few images instead of a thousand, which take seconds.
os.environ |= {
    "MOTO_ENABLE_AMI_VALIDATION": "true",
    "MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION": "true",
    "MOTO_AMIS_PATH": str(pathlib.Path(__file__).with_name("images.json")),
}

from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: E402

from .app import Emulator  # noqa: E402

TICK_S = 0.2


def main():
    folder = pathlib.Path(__file__).resolve().parents[2] / "cloud" / "policies"
    parser = argparse.ArgumentParser(prog="emulator", description=__doc__)
    parser.add_argument("--policies", type=pathlib.Path, default=folder, help="the folder with our IAM policies")
    parser.add_argument("--now", type=float, help="the cloud's clock stands here (seconds since 1970) until it is set")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input is closed")
    args = parser.parse_args()
    if not args.policies.is_dir():
        parser.error(f"there are no policies in {args.policies}; name their folder with --policies")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    emulator = Emulator(args.policies, args.now)

    class Handler(WSGIRequestHandler):
        def date_time_string(self, timestamp=None):
            """Each answer's Date: what time it is in the cloud."""
            return formatdate(emulator.clock.now(), usegmt=True)

    server = make_server("127.0.0.1", 0, emulator, threaded=True, request_handler=Handler)
    server.daemon_threads = True
    if args.with_parent:
        threading.Thread(target=_end_with_parent, args=(emulator,), daemon=True).start()
    threading.Thread(target=_tick, args=(emulator,), daemon=True).start()
    print(json.dumps({"endpoint": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid()}), flush=True)
    server.serve_forever()


def _end_with_parent(emulator):
    sys.stdin.buffer.read()
    emulator.guests.close()
    os._exit(0)


def _tick(emulator):
    """While the clock runs with the machine's, what is due happens without anybody calling."""
    pause = threading.Event()
    while not pause.wait(TICK_S):
        emulator.tick()


main()
