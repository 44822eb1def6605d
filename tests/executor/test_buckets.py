"""Step shapes: few, within the limits, and close enough to waste little."""

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.buckets import Bucket, StepLimits, choose_buckets, step_limits
from sgl_jax.executor.device_defaults import resolve_for_device


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
    "limits",
    [
        *((1, 4, 4), (5, 100, 100), (32, 512, 128), (256, 2048, 128), (64, 1, 1)),
        *((32, 512, 128, 4), (1, 32, 32, 8), (256, 2048, 128, 4)),
    ],
)
def test_every_step_within_the_limits_has_a_shape(platform, limits):
    limits = StepLimits(*limits)
    buckets = choose_buckets(limits, platform)
    for tokens in range(limits.tokens + 1):
        for rows in {1, tokens // (1 + limits.draft_tokens), tokens // 2, tokens}:
            rows = min(rows, limits.rows)
            bucket = buckets.smallest(tokens, rows)
            assert bucket.tokens >= tokens
            assert bucket.rows >= rows
    assert max(b.tokens for b in buckets.all) == limits.tokens
    assert max(b.rows for b in buckets.all) == limits.rows
    assert len(set(buckets.all)) == len(buckets.all) <= 14


def test_a_full_batch_of_decode_is_not_padded():
    buckets = choose_buckets(StepLimits(20, 512, 128), "cpu")
    assert buckets.smallest(20, 20) == Bucket(rows=20, tokens=20)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("chunk", [3, 100, 700])
def test_a_full_chunk_is_not_padded_alone_or_beside_a_full_batch_of_decode(platform, chunk):
    buckets = choose_buckets(StepLimits(20, chunk, 128, 4), platform)
    assert buckets.smallest(chunk, 1).tokens == chunk
    assert buckets.smallest(chunk + 100, 20).tokens == chunk + 100


def test_a_full_batch_of_drafting_rows_is_not_padded():
    for platform in ("cpu", "tpu"):
        buckets = choose_buckets(StepLimits(20, 512, 128, 4), platform)
        assert buckets.smallest(100, 20) == Bucket(rows=20, tokens=100)
        assert buckets.smallest(20, 20) == Bucket(rows=20, tokens=20)


def test_a_few_drafting_rows_run_alone_on_a_cpu():
    buckets = choose_buckets(StepLimits(20, 512, 128, 3), "cpu")
    assert [buckets.smallest(4 * rows, rows) for rows in (1, 4, 16)] == [(1, 4), (4, 16), (16, 64)]
    assert buckets.smallest(4, 4) == Bucket(rows=8, tokens=8)
    assert buckets.for_any_rows() == (2, 8, 20, 32, 80, 128, 512, 592)


@pytest.mark.parametrize("limits", [(32, 4096, 128), (32, 4096, 128, 3), (1, 4096, 128, 3)])
def test_padding_never_more_than_quadruples_a_steps_tokens(limits):
    for platform, least in (("cpu", 1), ("tpu", 8)):
        buckets = choose_buckets(StepLimits(*limits), platform)
        for tokens in range(least, 4097):
            assert buckets.smallest(tokens, 1).tokens < 4 * tokens


def test_decode_rows_and_their_drafts_come_on_top_of_a_chunk():
    assert StepLimits(20, 16, 16).tokens == 36
    assert StepLimits(20, 16, 16, 4).tokens == 116


def test_limits_come_from_the_arguments_and_else_from_the_platform():
    assert step_limits(resolve_for_device(ServerArgs(), "cpu")) == (32, 512, 128, 0)
    assert step_limits(resolve_for_device(ServerArgs(), "tpu")) == (256, 2048, 128, 0)
    drafting = ServerArgs(speculative_algorithm="NGRAM", speculative_num_draft_tokens=3)
    assert step_limits(resolve_for_device(drafting, "cpu")) == (32, 512, 128, 3)
    args = ServerArgs(max_running_requests=100, dp_size=3, chunked_prefill_size=16)
    assert step_limits(resolve_for_device(args, "tpu")) == (34, 16, 16, 0)
