"""`scripts/soak --minutes 30`: a server of its own, the load, a table, and a verdict.

`--faults` adds random faults, `--sessions 1000` replaces the mixed load by turns of sessions, and
`--rollouts` by rollouts with new weights every 30 seconds.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.live.live_server import LiveServer, live_server
from tests.soak import conversations, faults, rollouts
from tests.soak.conversations import Conversations
from tests.soak.faults import Faults
from tests.soak.load import Clients
from tests.soak.rollouts import Rollouts
from tests.soak.soak import FLAGS, Load, Soak

_INTERRUPTED = 130  # as shells say it


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description="Serve a mixed load for long and prove that nothing leaks."
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the load")
    parser.add_argument(
        "--faults",
        action="store_true",
        help="beside the clients: processes paused and killed, floods, slow readers, bad HTTP",
    )
    parser.add_argument(
        "--sessions",
        type=int,
        default=0,
        metavar="N",
        help="instead of the mixed load, turns of N sessions that are open at once",
    )
    parser.add_argument(
        "--rollouts",
        type=float,
        nargs="?",
        const=30.0,
        metavar="S",
        help="instead of the mixed load, rollouts with new weights every S seconds (%(const)s)",
    )
    args = parser.parse_args()
    if args.rollouts and (args.sessions or args.faults):
        parser.error("--rollouts has neither --sessions nor --faults")
    if not 0 <= args.sessions <= 4000:
        parser.error("--sessions must be in [0, 4000]")
    if not 0.1 <= args.minutes <= 10_000:
        parser.error("--minutes must be in [0.1, 10000]")
    return args


def flags_for(args: argparse.Namespace) -> tuple[str, ...]:
    """Of the server for this soak."""
    if args.rollouts:
        return rollouts.FLAGS
    flags = conversations.FLAGS if args.sessions else FLAGS
    return (*flags, *faults.FLAGS) if args.faults else flags


def soak_of(server: LiveServer, args: argparse.Namespace, folder: Path) -> Soak:
    """The soak that the command line asks for."""
    load: Load
    if args.rollouts:
        load = Rollouts(server.url, args.rollouts, folder)
    elif args.sessions:
        load = Conversations(server.url, args.sessions)
    else:
        load = Clients(server.url, may_refuse=args.faults)
    return Soak(
        server,
        load,
        args.minutes,
        args.seed,
        faults=Faults(server) if args.faults else None,
        keeps_sessions=bool(args.sessions),
    )


def main() -> int:
    """The exit code: 1 if anything failed, 130 after Ctrl-C, else 0."""
    args = parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sgl_jax-soak-"))
    soak, code = None, 0
    try:
        flags, is_quick = flags_for(args), bool(args.rollouts)
        with live_server(folder, *flags, is_quickly_compiled=is_quick) as server:
            soak = soak_of(server, args, folder)
            soak.run()
    except KeyboardInterrupt:
        print("interrupted")
        code = _INTERRUPTED
    except AssertionError as error:  # from the start or the end of the server
        code = 1
        if soak is None:
            print(f"FAILED: {error}")
        else:
            soak.failures.append(str(error))
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
