"""What requests gained: ids are listed again when the same rows become those of others."""

import numpy as np

from sgl_jax.core.engine_messages import RequestOutput
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.scheduler.output_buffer import OutputBuffer
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request
from tests.scheduler.driver import generate, make_sizes

NUM_ROWS = 4


def run(ranks: Ranks, dp_rank: int, row: int, rid: str) -> None:
    ranks.ranks[dp_rank].running.add(row, Request(generate(rid, [1, 2], 9), 0, 11), ())


def make_ranks(*rids: str) -> Ranks:
    """Ranks where requests run, a letter each, in rows from 1 on."""
    sizes = make_sizes(dp_size=len(rids), num_rows=NUM_ROWS)
    ranks = Ranks(sizes, SchedulerArgs())
    for dp_rank, own in enumerate(rids):
        for row, rid in enumerate(own, start=1):
            run(ranks, dp_rank, row, rid)
    return ranks


def gained(outputs: OutputBuffer) -> list[tuple[str, int]]:
    batch = outputs.take()
    assert batch is not None
    return list(zip(batch.rids, batch.token_ids(), strict=True))


def test_what_was_gained_is_taken_once() -> None:
    outputs, ranks = OutputBuffer(), make_ranks("ab", "c")
    rows = np.array([2, 1, NUM_ROWS + 1])
    outputs.add_plain(ranks, rows, np.array([7, -8, 2**31 - 1], np.int32))
    outputs.add_plain(ranks, rows[:2], np.array([1, 2], np.int32))
    assert gained(outputs) == [("b", 7), ("a", -8), ("c", 2**31 - 1), ("b", 1), ("a", 2)]
    assert outputs.take() is None


def test_a_row_that_another_request_holds_now_gains_for_that() -> None:
    outputs, ranks = OutputBuffer(), make_ranks("ab")
    outputs.add_plain(ranks, np.array([1, 2]), np.array([3, 4], np.int32))
    ranks.ranks[0].running.remove(2)
    ranks.tables.epoch[2] += 1  # as the row is freed
    run(ranks, 0, 2, "c")
    outputs.add_plain(ranks, np.array([1, 2]), np.array([5, 6], np.int32))
    assert gained(outputs) == [("a", 3), ("b", 4), ("a", 5), ("c", 6)]


def test_successive_batches_share_the_lists_of_ranks_that_did_not_change() -> None:
    outputs, ranks = OutputBuffer(), make_ranks("ab", "c", "d")
    other, last = NUM_ROWS + 1, 2 * NUM_ROWS + 1
    batches = []
    for rows in ([1, other, last], [1, 2, other], [other]):
        outputs.add_plain(ranks, np.array(rows), np.zeros(len(rows), np.int32))
        batch = outputs.take()
        assert batch is not None
        batches.append(batch.rid_lists)
    assert batches == [[["a"], ["c"], ["d"]], [["a", "b"], ["c"]], [["c"]]]
    assert batches[0][1] is batches[1][1] is batches[2][0]
    outputs.add_plain(ranks, np.zeros(0, np.intp), np.zeros(0, np.int32))
    assert outputs.take() is None


def test_only_what_is_kept_is_left_after_clear_to() -> None:
    outputs, ranks = OutputBuffer(), make_ranks("a")
    outputs.add_plain(ranks, np.array([1]), np.array([3], np.int32))
    outputs.clear_to([RequestOutput("b", [5], 0, 0)])
    batch = outputs.take()
    assert batch is not None
    assert (batch.rids, batch.token_ids()) == ([], [])
    assert [output.rid for output in batch.outputs] == ["b"]
