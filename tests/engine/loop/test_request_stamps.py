"""Stamps are sent once, and those of lost steps are forgotten."""

from sgl_jax.core.engine_messages import OutputBatch
from sgl_jax.engine.loop.request_stamps import RequestStamps


def test_each_stamp_travels_once_and_none_is_kept() -> None:
    stamps = RequestStamps([], has_marks=True)
    stamps.starts["r"] = 1.0
    stamps._launched.extend([(1, 1.0, [("lost", 4)]), (2, 2.0, [("r", 5)])])
    stamps.note_result(2)
    batch = stamps.add_to(OutputBatch())
    assert batch.starts == {"r": 1.0}
    assert {rid: [mark.num_tokens for mark in marks] for rid, marks in batch.marks.items()} == {
        "r": [5]
    }
    assert not stamps._launched
    assert stamps.add_to(OutputBatch()) == OutputBatch()
