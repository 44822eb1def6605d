"""Step shapes: few, within the limits, and close enough to waste little."""

from dataclasses import replace

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.buckets import Bucket, Buckets, choose_buckets
from sgl_jax.executor.device_defaults import resolve_for_device
from sgl_jax.kernels.row_blocks import BLOCK_ROWS, TPU_BLOCK_ROWS


def buckets_for(rows: int, chunk: int, platform: str, drafts: int = 0) -> Buckets:
    algorithm = "NGRAM" if drafts else "none"
    args = ServerArgs(
        max_running_requests=rows,
        chunked_prefill_size=chunk,
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=drafts or 4,
    )
    return choose_buckets(args, platform)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
    "limits",
    [
        *((1, 4, 0), (5, 100, 0), (32, 512, 0), (256, 2048, 0), (64, 1, 0)),
        *((32, 512, 4), (1, 32, 8), (256, 2048, 4)),
    ],
)
def test_every_step_within_the_limits_has_a_shape(platform, limits):
    rows, chunk, drafts = limits
    limits = buckets = buckets_for(rows, chunk, platform, drafts)
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
    buckets = buckets_for(20, 512, "cpu")
    assert buckets.smallest(20, 20) == Bucket(rows=20, tokens=20)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("chunk", [3, 100, 700])
def test_a_full_chunk_is_not_padded_alone_or_beside_a_full_batch_of_decode(platform, chunk):
    buckets = buckets_for(20, chunk, platform, 4)
    assert buckets.smallest(chunk, 1).tokens == chunk
    assert buckets.smallest(chunk + 100, 20).tokens == chunk + 100


def test_a_full_batch_of_drafting_rows_is_not_padded():
    for platform in ("cpu", "tpu"):
        buckets = buckets_for(20, 512, platform, 4)
        assert buckets.smallest(100, 20) == Bucket(rows=20, tokens=100)
        assert buckets.smallest(20, 20) == Bucket(rows=20, tokens=20)


def test_a_few_drafting_rows_run_alone_on_a_cpu():
    buckets = buckets_for(20, 512, "cpu", 3)
    assert [buckets.smallest(4 * rows, rows) for rows in (1, 4, 16)] == [(1, 4), (4, 16), (16, 64)]
    assert buckets.smallest(4, 4) == Bucket(rows=8, tokens=8)
    assert buckets.for_any_rows() == (2, 8, 20, 32, 80, 128, 512, 592)


@pytest.mark.parametrize(("rows", "drafts"), [(32, 0), (32, 3), (1, 3)])
def test_padding_never_more_than_quadruples_a_steps_tokens(rows, drafts):
    for platform, least in (("cpu", 1), ("tpu", 8)):
        buckets = buckets_for(rows, 4096, platform, drafts)
        for tokens in range(least, 4097):
            assert buckets.smallest(tokens, 1).tokens < 4 * tokens


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_an_eighth_of_a_chunk_of_tenants_that_share_is_not_padded(platform):
    args = ServerArgs(max_running_requests=20, chunked_prefill_size=700, fair_share="tokens")
    assert choose_buckets(args, platform).smallest(108, 20) == Bucket(rows=20, tokens=108)
    of_keys = replace(args, fair_share="off", api_key_file="keys.json")
    assert Bucket(rows=20, tokens=108) not in choose_buckets(of_keys, platform).all


def test_decode_rows_and_their_drafts_come_on_top_of_a_chunk():
    assert buckets_for(20, 16, "tpu").tokens == 36
    assert buckets_for(20, 16, "tpu", 4).tokens == 116


def test_limits_come_from_the_arguments_and_else_from_the_platform():
    def limits(args, platform):
        buckets = choose_buckets(resolve_for_device(args, platform), platform)
        return (*buckets[:3], buckets.prompt_logprob_tokens)

    assert limits(ServerArgs(), "cpu") == (32, 512, 0, 128)
    assert limits(ServerArgs(), "tpu") == (256, 2048, 0, 128)
    drafting = ServerArgs(speculative_algorithm="NGRAM", speculative_num_draft_tokens=3)
    assert limits(drafting, "cpu") == (32, 512, 3, 128)
    args = ServerArgs(max_running_requests=100, dp_size=3, chunked_prefill_size=16)
    assert limits(args, "tpu") == (34, 16, 0, 16)


def test_two_shapes_serve_every_step_and_the_others_follow_by_what_they_save():
    buckets = buckets_for(20, 512, "cpu")
    assert buckets.first == (Bucket(20, 20), Bucket(20, 532))
    # 32 of 532 tokens, 2 of 20, 128 of 532, 8 of 20, 512 of 532.
    assert [own.tokens for own in buckets.by_saving()] == [32, 2, 128, 8, 512]
    one = buckets_for(1, 1, "tpu")
    assert one.first == (one.smallest(1, 1), one.all[-1])
    for rows, chunk, drafts in ((32, 512, 4), (256, 2048, 0), (1, 1, 0)):
        own = buckets_for(rows, chunk, "tpu", drafts)
        assert sorted((*own.first, *own.by_saving())) == sorted(own.all)


@pytest.mark.parametrize(
    ("platform", "backend", "least"),
    [("cpu", "xla", BLOCK_ROWS), ("cpu", "pallas", TPU_BLOCK_ROWS), ("tpu", "pallas", 256)],
)
@pytest.mark.parametrize("rows", [2, 40])
def test_shapes_of_deterministic_inference_have_whole_blocks(rows, platform, backend, least):
    args = ServerArgs(
        max_running_requests=rows,
        chunked_prefill_size=100,
        enable_deterministic_inference=True,
        attention_backend=backend,
    )
    buckets = choose_buckets(args, platform)
    assert min(bucket.rows for bucket in buckets.all) >= least
    assert min(bucket.tokens for bucket in buckets.all) >= least
    assert buckets.all[-1].tokens >= 100 + rows
    # A whole block is computed, but no more requests run than were permitted.
    assert buckets.rows == rows
    assert buckets.for_any_rows() == tuple(bucket.tokens for bucket in buckets.all)
