"""A real server that is never idle, its memory records broken from outside: the walk finds each
defect.

The walk of an idle engine is switched off, so that a gap in the load cannot find one instead.
"""

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.live.live_server import LiveServer, live_server
from tests.live.test_memory_defects import install_in_engine
from tests.support.waiting import until

HYBRID = Path(__file__).parents[2] / "models" / "demo_hybrid"
FLAGS = (
    *("--context-length", "256", "--max-running-requests", "4", "--decode-log-interval", "0"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--memory-error-action", "repair"),
    *("--max-total-tokens", "65536"),  # so that nothing is evicted
)
NUM_STREAMS = 3
MOST_SECONDS = 60.0
KINDS = ("page owner", "lock count", "state slot", "host block")
# When the file appears, rank 0 gets the defect that it names, at the end of a step.
SABOTAGE = """
import os
import numpy as np
import sgl_jax.scheduler.scheduler as module
from sgl_jax.mem_cache.pages.pool_records import TREE

commit = module.Scheduler._apply_result

def give_to_row(allocator, owner):
    allocator._owner[np.flatnonzero(allocator._owner == TREE)[-1]] = owner

def break_record(rank, kind):
    memory = rank.memory
    if kind == "page owner":
        give_to_row(memory.allocator, 1)
    elif kind == "lock count":
        next(node for node in memory.cache.nodes() if not node.children).locks[0] += 1
    elif kind == "state slot":
        give_to_row(memory.allocators[memory.state_pool], 1)
    elif kind == "host block":
        give_to_row(rank.host.tier.blocks.allocators[0], 99999)

def commit_and_break(self, event):
    commit(self, event)
    if os.path.exists({flag!r}):
        break_record(self.ranks[0], open({flag!r}).read())
        os.remove({flag!r})

module.Scheduler._apply_result = commit_and_break
module.Scheduler.audit = lambda self: None
"""


@contextmanager
def streams(server: LiveServer) -> Iterator[list[int]]:
    """Requests without an end, `NUM_STREAMS` at a time; yields the status of each that ended."""
    is_over = threading.Event()
    statuses: list[int] = []

    def ask(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=server.url, timeout=240) as client:
            for length in itertools.cycle((60, 110, 160)):
                prompt = [rng.randrange(300, 700) for _ in range(40 + number)]
                sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": sampling}
                statuses.append(client.post("/generate", json=body).status_code)
                if is_over.is_set():
                    return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def counters(server: LiveServer) -> dict[str, int]:
    found: dict[str, int] = server.get("/get_server_info")["counters"]
    return found


def until_walked(server: LiveServer) -> None:
    """Wait until the tree and host memory hold prefixes, and then another walk has ended."""

    def has_prefixes() -> bool:
        (rank,) = server.get("/get_server_info")["ranks"]
        return rank["cached_pages"] > 0 and rank["host_pools"][0]["cached_blocks"] > 0

    until(has_prefixes, "prefixes in both memories", 120.0)
    num_walks = counters(server)["memory_walks"]
    until(lambda: counters(server)["memory_walks"] > num_walks, "a walk ends", MOST_SECONDS)


# By default tests/engine has it, on the oracle.
@pytest.mark.long
def test_a_defect_under_constant_load_is_reported_within_60_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "break"
    install_in_engine(SABOTAGE.format(flag=str(flag)), tmp_path, monkeypatch)
    flags = (*FLAGS, "--memory-dump-dir", str(tmp_path / "dumps"))
    with live_server(tmp_path, *flags, model=HYBRID) as server, streams(server) as statuses:
        for num_broken, kind in enumerate(KINDS):
            # As late as can be before the walk that finds it.
            until_walked(server)
            before = counters(server)
            assert before["memory_errors"] == num_broken
            (tmp_path / "kind").write_text(kind)
            (tmp_path / "kind").rename(flag)
            until(lambda: not flag.exists(), f"{kind} is broken")
            until(
                lambda count=num_broken: counters(server)["memory_errors"] > count,  # type: ignore[misc]
                f"{kind} is reported",
                MOST_SECONDS,
            )
            after = counters(server)
            # A walk that had begun may have passed the record; the next one has not.
            assert after["memory_walks"] <= before["memory_walks"] + 1
            assert after["steps"] > before["steps"]
        log = server.log.read_text()
        # Found by walks, and not when memory was used or freed.
        assert log.count("CRITICAL") == log.count("in run_if_due") == len(KINDS)
        assert statuses.count(500) >= len(KINDS)
        assert set(statuses) == {200, 500}
