"""Records of experts that an operator asks for, and why one is refused."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from sgl_jax.core.profile_messages import DumpExpertRecord, StartExpertRecord, StopExpertRecord
from sgl_jax.engine.loop.controls import Controls
from sgl_jax.executor.expert_recorder import ExpertRecorder, ReadCounts


def controls(read: ReadCounts) -> Controls:
    executor = SimpleNamespace(expert_recorder=ExpertRecorder(read), compile_counts=dict)
    core: Any = SimpleNamespace(executor=executor, scheduler=None)
    return Controls(core, None)


def growing_counts() -> ReadCounts:
    """Two ranks' counts of one layer's two experts, near the end of 32 bits."""
    steps: Iterator[int] = iter(range(100))
    start = np.array([[[2**32 - 2, 5]], [[0, 1]]], np.uint32)
    more = np.array([[[1, 0]], [[2, 3]]], np.uint32)
    return lambda: start + more * np.uint32(next(steps))


START, STOP, DUMP = StartExpertRecord(rid="a"), StopExpertRecord(rid="b"), DumpExpertRecord(rid="c")


def test_a_record_has_the_ranks_choices_between_its_start_and_its_end() -> None:
    own = controls(growing_counts())
    assert own.start_expert_record(START).ok
    assert own.dump_expert_record(DUMP).data == {"logical_count": [[3, 3]]}
    assert own.stop_expert_record(STOP).data == {}
    for _ in range(2):
        assert own.dump_expert_record(DUMP).data == {"logical_count": [[6, 6]]}
    assert own.start_expert_record(START).ok
    assert own.dump_expert_record(DUMP).data == {"logical_count": [[3, 3]]}


def test_calls_out_of_turn_are_refused() -> None:
    own = controls(growing_counts())
    for refused in (own.stop_expert_record(STOP), own.dump_expert_record(DUMP)):
        assert (refused.ok, refused.data["code"]) == (False, "record_refused")
    assert own.start_expert_record(START).ok
    assert own.start_expert_record(START).message == "a record of experts runs already"


def test_an_engine_that_does_not_count_names_the_flag() -> None:
    refused = controls(lambda: None).start_expert_record(START)
    assert "--expert-distribution-recorder-mode stat" in refused.message


def test_a_record_goes_on_after_its_counts_were_lost() -> None:
    counts = np.array([[[7, 7]]], np.uint32)
    recorder = ExpertRecorder(counts.copy)
    recorder.start()
    counts[:] = [1, 2]
    recorder.after_reset()
    np.testing.assert_array_equal(recorder.counts(), [[1, 2]])
