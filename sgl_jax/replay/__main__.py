"""The command line: `python -m sgl_jax.replay FILE`.

Exit code 0: the scheduler decided as recorded. 1: it did not, and the first difference was printed.
2: the file cannot be read.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_jax.replay.player import DifferenceError, Player
from sgl_jax.replay.view import show
from sgl_jax.scheduler.events import Planned, Record
from sgl_jax.scheduler.record.event_log import EventReader, RecordingError


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.view:
            show(Path(args.file), args.port)
            return 0
        with open(args.file, "rb") as file:
            return _replay(EventReader(file), args)
    except (RecordingError, OSError) as error:
        print(f"cannot replay {args.file}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_jax.replay",
        description="Run a scheduler again on recorded events; find where it decides otherwise.",
    )
    parser.add_argument("file", help="written by a server with --record-events")
    parser.add_argument("--until", type=int, metavar="N", help="stop after event N")
    parser.add_argument(
        "--check-memory",
        choices=("off", "idle", "busy"),
        default="off",
        help="prove the ledger after each event (busy), or whenever nothing runs (%(default)s)",
    )
    parser.add_argument("--view", action="store_true", help="show its memory in a browser")
    parser.add_argument(
        "--port", type=int, default=0, help="of the view, on this machine (default: a free one)"
    )
    parser.add_argument("--verbose", action="store_true", help="print a line for each event")
    return parser


def _replay(reader: EventReader, args: argparse.Namespace) -> int:
    player = Player(reader.started, args.check_memory)
    try:
        for event in reader:
            if args.until is not None and player.num_events >= args.until:
                break
            if args.verbose:
                print(f"{player.num_events + 1:>8}  {_in_a_line(event)}")
            player.feed(event)
        else:
            # A truncated recording may lack the error of its last event.
            if not reader.is_truncated:
                player.finish()
    except DifferenceError as difference:
        for note in player.notes:
            print(f"note, {note}")
        print(f"the scheduler does not do what was recorded.\n{difference}")
        return 1
    _print_summary(player)
    if reader.is_truncated:
        print("the last event was cut off in the midst of writing, and left out")
    return 0


def _in_a_line(event: Record) -> str:
    if not isinstance(event, Planned):
        return repr(event)[:160]
    if event.plan is None:
        return "Planned nothing"
    ranks = [
        f"rank {r}: {rank.num_decode} decode, {len(rank.rows) - rank.num_decode} prefill, "
        f"{len(rank.admissions)} admitted, {rank.num_tokens} tokens"
        for r, rank in enumerate(event.plan.ranks)
    ]
    return f"Planned step {event.plan.step_id}, {'; '.join(ranks)}"


def _print_summary(player: Player) -> None:
    counters = player.scheduler.counters()
    print(
        f"as recorded: {player.num_events} events, {counters['steps_planned']} steps, "
        f"{counters['requests_received']} requests, {counters['generated_tokens']} tokens, "
        f"{counters['requests_retracted']} retracts, {counters['evicted_pages']} pages evicted, "
        f"{player.num_raised} errors"
    )
    print(
        f"at the end {player.scheduler.num_running} running, {player.scheduler.num_waiting} waiting"
    )
    for view in player.scheduler.memory_views():
        print(
            f"rank {view.dp_rank}: {view.total_pages} pages, {view.free_pages} free, "
            f"{view.leased_pages} leased, {view.cached_pages} cached "
            f"({view.protected_pages} protected), {view.session_held_pages} held by sessions; "
            f"{view.free_rows} of {view.total_rows} rows free"
        )


if __name__ == "__main__":
    sys.exit(main())
