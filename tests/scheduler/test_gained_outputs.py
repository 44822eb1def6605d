"""What requests gained: ids are listed again when the same rows become those of others."""

import numpy as np

from sgl_jax.core.messages import RequestOutput
from sgl_jax.scheduler.gained_outputs import GainedOutputs
from sgl_jax.scheduler.request import Request
from sgl_jax.scheduler.running_rows import RowColumns, RunningRows
from tests.scheduler.driver import generate


def make_running(rids: str) -> RunningRows:
    running = RunningRows(RowColumns.empty(4, 32))
    for row, rid in enumerate(rids, start=1):
        running.add(row, Request(generate(rid, [1, 2], 9), 0, 11), ())
    return running


def gained(outputs: GainedOutputs) -> list[tuple[str, int]]:
    batch = outputs.take()
    assert batch is not None
    return list(zip(batch.rids, batch.token_ids(), strict=True))


def test_what_was_gained_is_taken_once() -> None:
    outputs, running = GainedOutputs(2), [make_running("ab"), make_running("c")]
    rows = [np.array([2, 1]), np.array([1])]
    outputs.add_plain(running, rows, np.array([7, -8, 2**31 - 1], np.int32))
    outputs.add_plain(running, [rows[0], rows[1][:0]], np.array([1, 2], np.int32))
    assert gained(outputs) == [("b", 7), ("a", -8), ("c", 2**31 - 1), ("b", 1), ("a", 2)]
    assert outputs.take() is None


def test_a_row_that_another_request_holds_now_gains_for_that() -> None:
    outputs, running = GainedOutputs(1), make_running("ab")
    rows = [np.array([1, 2])]
    outputs.add_plain([running], rows, np.array([3, 4], np.int32))
    running.remove(2)
    running.add(2, Request(generate("c", [1, 2], 9), 0, 11), ())
    outputs.add_plain([running], rows, np.array([5, 6], np.int32))
    assert gained(outputs) == [("a", 3), ("b", 4), ("a", 5), ("c", 6)]


def test_only_what_is_kept_is_left_after_clear_to() -> None:
    outputs, running = GainedOutputs(1), make_running("a")
    outputs.add_plain([running], [np.array([1])], np.array([3], np.int32))
    outputs.clear_to([RequestOutput("b", [5], 0, 0)])
    batch = outputs.take()
    assert batch is not None
    assert (batch.rids, batch.token_ids()) == ([], [])
    assert [output.rid for output in batch.outputs] == ["b"]
