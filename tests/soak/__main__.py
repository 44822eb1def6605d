"""`scripts/soak --minutes 30`: a server of its own, the load, a table, and a verdict."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.live.live_server import live_server
from tests.soak.soak import FLAGS, Soak

_INTERRUPTED = 130  # as shells say it


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description="Serve a mixed load for long and prove that nothing leaks."
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the load")
    args = parser.parse_args()
    if not 0.1 <= args.minutes <= 10_000:
        parser.error("--minutes must be in [0.1, 10000]")
    return args


def main() -> int:
    """The exit code: 1 if anything failed, 130 after Ctrl-C, else 0."""
    args = parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sgl_jax-soak-"))
    soak, code = None, 0
    try:
        with live_server(folder, *FLAGS) as server:
            soak = Soak(server, args.minutes, args.seed)
            soak.run()
    except KeyboardInterrupt:
        print("interrupted")
        code = _INTERRUPTED
    except AssertionError as error:  # from the start or the end of the server
        print(f"FAILED: {error}")
        code = 1
    if soak is not None:
        print(soak.conclude())
        if soak.failures:
            code = 1
    if code == 1:
        print(f"the server's log is {folder / 'server.log'}")
    else:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
