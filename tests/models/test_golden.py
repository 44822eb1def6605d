"""The engine's models say what transformers says, in float32, however the work is cut up.

Golden data: tests/golden, made by scripts/make_golden.py.
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.checkpoint.convert import convert
from sgl_jax.checkpoint.loading import detect_format, load_params
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.kernels.attention.api import AttentionBatch
from sgl_jax.layers.attention import replicated_kv_heads
from sgl_jax.layers.mesh_axes import join_shares
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import place_model

GOLDEN = Path(__file__).parents[1] / "golden"
WITH_WINDOWS = ("mistral", "qwen2_windows", "gemma3", "gpt_oss")
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe_mixed", *WITH_WINDOWS)
CACHE_SPEC = P(None, "data", "tensor", None, None)
TOLERANCE = 1e-4


class Chunk(NamedTuple):
    """One row of a step: which request, and which of its tokens."""

    request: int
    start: int
    tokens: np.ndarray


class Server:
    """A model on a mesh, its cache, and pages dealt out in random order; one request per row."""

    def __init__(
        self,
        folder,
        *,
        dp=1,
        tp=1,
        page_size=16,
        weight_sharding="replicated",
        attention_backend="auto",
        unrolled_layers=None,
    ):
        devices = np.array(jax.devices()[: dp * tp]).reshape(dp, tp)
        self.mesh = Mesh(devices, ("data", "tensor"))
        config = ModelConfig.from_path(folder)
        args = ServerArgs(
            dp_size=dp,
            tp_size=tp,
            page_size=page_size,
            weight_sharding=weight_sharding,
            attention_backend=attention_backend,
        )
        options = EngineConfig.resolve(args, config, "cpu").build_options
        if unrolled_layers is not None:  # as on TPUs that share a rank
            options = options._replace(
                separates_layers=False, unrolled_layers=unrolled_layers, defers_sum=True
            )
        placed = place_model(config, self.mesh, options)
        self.graphdef = placed.graphdef
        self.params = load_params(placed, folder, detect_format(folder))
        self.dp, self.page_size, self.pages_per_row = dp, page_size, -(-80 // page_size)
        kv_heads = replicated_kv_heads(config.num_heads, config.num_kv_heads, tp)
        groups = config.cache_groups()
        num_pages = 1 + len(groups) * 3 * self.pages_per_row
        layers = {group.pool: len(group.layers) for group in groups}
        # NaN in every slot that was never written: reading one would show.
        self.pools = tuple(
            jax.device_put(
                jnp.full(
                    (layers[pool], dp * num_pages, 2 * kv_heads, page_size, config.head_dim),
                    jnp.nan,
                ),
                NamedSharding(self.mesh, CACHE_SPEC),
            )
            for pool in range(len(layers))
        )
        pages = 1 + np.random.default_rng(0).permutation(num_pages - 1)
        # Of each request and group: those of a group follow those of another in a row's table.
        self.pages = pages.reshape(3, len(groups), self.pages_per_row).astype(np.int32)
        self.num_groups = len(groups)

    def step(self, ranks, num_decode, num_tokens=64):
        """Run one step; ranks[r] lists rank r's chunks. Returns logits per rank, [tokens, V]."""
        rows = 4
        tokens = np.zeros((self.dp, num_tokens), np.int32)
        tables = np.zeros((self.dp, self.num_groups, rows, self.pages_per_row), np.int32)
        starts, lens = np.zeros((2, self.dp, rows), np.int32)
        for rank, chunks in enumerate(ranks):
            flat = np.concatenate([chunk.tokens for chunk in chunks])
            tokens[rank, : len(flat)] = flat
            for row, chunk in enumerate(chunks):
                tables[rank, :, row] = self.pages[chunk.request]
                starts[rank, row], lens[rank, row] = chunk.start, len(chunk.tokens)
        decode = np.full(self.dp, num_decode, np.int32)
        logits, self.pools = self._run()(
            self.params, self.pools, tokens, tables, starts, lens, decode
        )
        counts = [sum(len(chunk.tokens) for chunk in chunks) for chunks in ranks]
        return [np.asarray(logits)[rank, :count] for rank, count in enumerate(counts)]

    def _run(self):
        if not hasattr(self, "_compiled"):
            specs = jax.tree.map(lambda array: array.sharding.spec, self.params)
            arrays = (P("data"),) * 5
            self._compiled = jax.jit(
                jax.shard_map(
                    self._step,
                    mesh=self.mesh,
                    in_specs=(specs, (CACHE_SPEC,) * len(self.pools), *arrays),
                    out_specs=(P("data"), (CACHE_SPEC,) * len(self.pools)),
                    check_vma=False,
                ),
                donate_argnums=1,
            )
        return self._compiled

    def _step(self, params, pools, tokens, tables, starts, lens, num_decode):
        model = nnx.merge(self.graphdef, params)
        rows = (starts[0], lens[0], num_decode[0])
        batches = [AttentionBatch.build(table, *rows, tokens.shape[1]) for table in tables[0]]
        hidden, pools = model(tokens[0], batches, pools)
        return join_shares(model.logits(hidden).whole_rows(), tokens.shape[1])[None], pools


def golden(family):
    return np.load(GOLDEN / family / "golden.npz")


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


class Setup(NamedTuple):
    dp: int = 1
    tp: int = 1
    page_size: int = 16
    weight_sharding: str = "replicated"
    attention_backend: str = "auto"
    unrolled_layers: int | None = None


ONE_TOKEN_PAGES = Setup(page_size=1)
ONE_PAGE_A_ROW = Setup(page_size=128)
TWO_CHIPS = Setup(tp=2)
MORE_CHIPS_THAN_KV_HEADS = Setup(tp=4)
TWO_RANKS = Setup(dp=2)
SPLIT_WEIGHTS = Setup(dp=2, tp=2, weight_sharding="data")
UNROLLED = Setup(tp=2, unrolled_layers=2)
SIMULATED_TPU = Setup(attention_backend="pallas")


@pytest.mark.parametrize(
    ("family", "setup"),
    [
        *[(family, ONE_TOKEN_PAGES) for family in FAMILIES],
        ("llama", TWO_CHIPS),
        ("llama", SPLIT_WEIGHTS),
        ("qwen3_moe", SPLIT_WEIGHTS),
        ("qwen3_moe_mixed", SPLIT_WEIGHTS),
        ("qwen2", MORE_CHIPS_THAN_KV_HEADS),
        ("qwen3", TWO_RANKS),
        ("qwen3_moe", MORE_CHIPS_THAN_KV_HEADS),
        *[(family, TWO_CHIPS) for family in WITH_WINDOWS],
        *[
            pytest.param(family, setup, marks=() if family == "gemma3" else pytest.mark.long)
            for family in WITH_WINDOWS
            for setup in (Setup(), ONE_PAGE_A_ROW, TWO_RANKS)
        ],
        ("qwen3", UNROLLED),
        ("qwen3_moe_mixed", UNROLLED),
        ("gemma3", SPLIT_WEIGHTS),
        ("gemma3", MORE_CHIPS_THAN_KV_HEADS),
        ("gemma3", UNROLLED),
        ("gpt_oss", SPLIT_WEIGHTS),
        ("gpt_oss", MORE_CHIPS_THAN_KV_HEADS),
        ("gpt_oss", UNROLLED),
        ("gpt_oss_mxfp4", Setup()),
        ("gpt_oss_mxfp4", SPLIT_WEIGHTS),
        ("gpt_oss_mxfp4", MORE_CHIPS_THAN_KV_HEADS),
        pytest.param("qwen3_moe", SIMULATED_TPU, marks=pytest.mark.long),
        pytest.param("gemma3", SIMULATED_TPU, marks=pytest.mark.long),
        pytest.param("gpt_oss", SIMULATED_TPU, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_prefill_whole_or_chunked_and_decode_match_transformers(family, setup):
    data = golden(family)
    prompt, greedy = data["prompt"], data["greedy"]
    server = Server(GOLDEN / family, **setup._asdict())
    # Request 0 prefills in three chunks. Beside it, request 1 prefills in one, then decodes.
    bounds = (0, 7, 23, len(prompt))
    positions = len(prompt)
    for step, (start, stop) in enumerate(pairwise(bounds)):
        chunk = Chunk(0, start, prompt[start:stop])
        if step == 0:
            other = Chunk(1, 0, prompt[:17])
            first, second = (chunk, other)
            expected = np.concatenate([data["prompt_logits"][:7], data["prompt_logits"][:17]])
        else:
            other = Chunk(1, 16 + step, prompt[16 + step : 17 + step])
            first, second = (other, chunk)
            expected = data["prompt_logits"][[16 + step, *range(start, stop)]]
        for logits in server.step([[first, second]] * setup.dp, num_decode=int(step > 0)):
            assert_close(logits, expected)
    for step, token in enumerate(greedy[:-1]):
        decode = Chunk(0, positions + step, np.array([token]))
        for logits in server.step([[decode]] * setup.dp, num_decode=1):
            assert_close(logits[0], data["greedy_logits"][step + 1])
            assert logits[0].argmax() == greedy[step + 1]
    # Request 2 prefills in one chunk.
    for logits in server.step([[Chunk(2, 0, prompt)]] * setup.dp, num_decode=0):
        assert_close(logits, data["prompt_logits"])
        assert logits[-1].argmax() == greedy[0]


@pytest.mark.parametrize("family", ["gpt_oss", "gpt_oss_mxfp4", "gemma3"])
def test_rows_that_are_padded_for_a_tpu_change_nothing(family, tmp_path, monkeypatch):
    for module in ("decoder", "gpt_oss"):
        monkeypatch.setattr(f"sgl_jax.models.{module}.row_size", lambda size: size + 3)
    data, folder = golden(family), GOLDEN / family
    convert(folder, tmp_path / "orbax", "float32")
    for server in (Server(folder, tp=2), Server(tmp_path / "orbax", tp=4)):
        assert server.params["embedding"]["weight"].shape[1] == 35
        (logits,) = server.step([[Chunk(0, 0, data["prompt"])]], num_decode=0)
        assert_close(logits, data["prompt_logits"])


def test_ranks_do_not_disturb_each_other():
    """Two ranks use the same page ids for different texts."""
    data = golden("qwen3")
    server = Server(GOLDEN / "qwen3", dp=2)
    whole, half = Chunk(0, 0, data["prompt"]), Chunk(0, 0, data["prompt"][20:])
    first, second = server.step([[whole], [half]], num_decode=0)
    assert_close(first, data["prompt_logits"])
    (alone,) = Server(GOLDEN / "qwen3").step([[half]], num_decode=0)
    assert_close(second, alone)


@pytest.mark.long
def test_simulated_kernels_find_the_weights_and_the_cache_of_unlike_layers():
    data = golden("qwen3_moe_mixed")
    server = Server(GOLDEN / "qwen3_moe_mixed", **SIMULATED_TPU._asdict())
    (logits,) = server.step([[Chunk(0, 0, data["prompt"][:17])]], 0, num_tokens=32)
    assert_close(logits, data["prompt_logits"][:17])
    (logits,) = server.step([[Chunk(0, 17, data["prompt"][17:18])]], 1, num_tokens=32)
    assert_close(logits, data["prompt_logits"][17:18])
