"""Values in a store: engines with other numbers of chips and other pages read them.

Both engines describe the same tokens. Each puts them into its own arrays by the rules of
`KVPoolLayout` and `StatePoolLayout`, written down here once more.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from numpy.typing import NDArray

from sgl_jax.core.layer_configs import GatedDeltaConfig
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.transfers import StoreTransfer, TransferEnd
from sgl_jax.executor.block_pool import BlockPool
from sgl_jax.executor.block_stores.opening import weights_fingerprint
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.executor.store_transfers import StoreTransfers
from sgl_jax.layers.head_sources import FusedHeads, Heads, HeadVectors
from sgl_jax.layers.sources import Padded, Stacked, Swapped, Tensor
from sgl_jax.mem_cache.device_pool import (
    KVPoolLayout,
    StatePoolLayout,
    kv_pool_shape,
    state_pool_shapes,
)
from sgl_jax.mem_cache.offload.content_keys import ContentKeys
from sgl_jax.models.config import ModelConfig

NUM_TOKENS, NUM_LAYERS, FLOAT = 256, 2, np.dtype(np.float32)
TOKENS = np.random.default_rng(1).integers(0, 99, NUM_TOKENS, np.int32)
RECURRENCE = GatedDeltaConfig(
    num_key_heads=4, num_value_heads=8, key_dim=4, value_dim=8, conv_size=4
)


class Kind(NamedTuple):
    """Heads of a model: `size` numbers in K and in V, or in a latent."""

    num_heads: int
    size: int
    is_latent: bool = False


KINDS = {
    "K and V": Kind(2, 6),
    "K and V in a row": Kind(2, 64),
    "four heads": Kind(4, 6),
    "latent": Kind(1, 10, is_latent=True),
}


class Store:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        assert not self.values.keys() & keys, "no value is put twice"
        self.values.update(zip(keys, values, strict=True))

    def close(self) -> None: ...


def mesh_of(tp_size: int) -> Mesh:
    return Mesh(np.array(jax.devices())[:tp_size].reshape(1, -1), ("data", "tensor"))


def kv_pool(kind: Kind, tp_size: int, page_size: int) -> tuple[BlockPool, KVPoolLayout]:
    num_kv = max(kind.num_heads, tp_size)
    copies = num_kv // kind.num_heads
    layout = KVPoolLayout(NUM_LAYERS, num_kv, page_size, kind.size, FLOAT, kind.is_latent, copies)
    mesh = mesh_of(tp_size)
    shape = kv_pool_shape(layout, 1, mesh)
    return BlockPool([shape], [layout.chip_view], NUM_TOKENS // page_size + 1, mesh), layout


def pages_of(kind: Kind, kv: NDArray[Any], tp_size: int, page_size: int) -> NDArray[Any]:
    """KV of tokens, [K or V, layers, heads, tokens, size], as pages [pages, layers, ...]."""
    pages = []
    for first in range(0, NUM_TOKENS, page_size):
        own = kv[:, :, :, first : first + page_size]
        num_kv = max(kind.num_heads, tp_size)
        of_heads = [own[:, :, head * kind.num_heads // num_kv] for head in range(num_kv)]
        each = len(of_heads) // tp_size
        chips = [of_heads[i : i + each] for i in range(0, len(of_heads), each)]
        parts = []
        for heads in chips:
            if kind.is_latent:
                parts += [head[0] for head in heads]
            elif kind.size == 64:
                parts += [np.concatenate([*head], axis=-1) for head in heads]
            else:
                parts += [head[0] for head in heads] + [head[1] for head in heads]
        pages.append(np.stack(parts, axis=1))
    return np.stack(pages)


def all_blocks(pool: BlockPool, num_blocks: int) -> list[NDArray[Any]]:
    """The arrays of blocks 1 to `num_blocks`."""
    found: list[list[NDArray[Any]]] = []
    for first in range(1, num_blocks + 1, pool.piece_pages):
        blocks = np.arange(first, min(first + pool.piece_pages, num_blocks + 1), dtype=np.int32)
        found.append([np.asarray(array)[: len(blocks)] for array in pool.read(0, blocks)])
    return [np.concatenate(each) for each in zip(*found, strict=True)]


def fill(pool: BlockPool, contents: Sequence[NDArray[Any]]) -> None:
    """Write `contents`, arrays [n, layers, ...], to blocks 1 to n."""
    for first in range(0, len(contents[0]), pool.piece_pages):
        pieces = []
        for array, piece in zip(contents, pool._values, strict=True):
            own = array[first : first + pool.piece_pages]
            padded = np.zeros(piece.shape, piece.dtype)
            padded[: len(own)] = own
            pieces.append(jax.device_put(padded, piece.sharding))
        blocks = np.arange(first + 1, first + 1 + len(own), dtype=np.int32)
        pool.write(0, blocks, tuple(pieces))


def moved(store: Store, pool: BlockPool, page_size: int, step: str) -> TransferEnd:
    """Run one transfer of all pages."""
    ends: list[TransferEnd] = []
    transfers = StoreTransfers(store, [pool], "ab", ends.append)
    keys = ContentKeys(page_size, 1).of(TOKENS, "a tenant")[0]
    blocks = np.arange(1, len(keys) + 1, dtype=np.int32)
    move = StoreTransfer(0, 1, (keys,), (blocks,) if step != "searches" else ())
    begun: dict[str, list[StoreTransfer]] = {"searches": [], "loads": [], "puts": []}
    begun[step].append(move)
    transfers.begin(**begun)
    transfers.wait()
    transfers.close()
    return ends[0]


def check(kind: Kind, writer: tuple[int, int], reader: tuple[int, int], seed: int) -> None:
    num_parts = 1 if kind.is_latent else 2
    shape = (num_parts, NUM_LAYERS, kind.num_heads, NUM_TOKENS, kind.size)
    kv = np.random.default_rng(seed).standard_normal(shape).astype(FLOAT)
    store = Store()
    source, written = kv_pool(kind, *writer)
    fill(source, [pages_of(kind, kv, *writer)])
    assert moved(store, source, writer[1], "puts").succeeded
    target, read = kv_pool(kind, *reader)
    assert read.of_one_chip(1) == written.of_one_chip(1)
    search = moved(store, target, reader[1], "searches")
    is_same = min(writer[1], 16) == min(reader[1], 16)
    assert search.found[0].all() == search.found[0].any() == is_same
    assert search.has_other_sizes == (not is_same), "a miss says why"
    if is_same:
        assert moved(store, target, reader[1], "loads").found[0].all()
        (found,) = all_blocks(target, NUM_TOKENS // reader[1])
        assert found.tobytes() == pages_of(kind, kv, *reader).tobytes()


SIZES = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([8, 16, 32, 64, 128]))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(KINDS)), SIZES, SIZES, st.integers(0, 99))
def test_kv_of_other_chips_and_pages_comes_back(
    name: str, writer: tuple[int, int], reader: tuple[int, int], seed: int
) -> None:
    check(KINDS[name], writer, reader, seed)


def test_a_page_is_found_with_all_its_values_only_and_gets_back_those_that_are_lost() -> None:
    store, (pool, layout) = Store(), kv_pool(KINDS["K and V"], 1, 64)
    contents = np.random.default_rng(0).standard_normal((4, NUM_LAYERS, *layout.page_shape))
    fill(pool, [contents.astype(FLOAT)])
    for number in range(16):
        assert moved(store, pool, 64, "puts").succeeded
        assert len(store.values) == 16
        lost = store.values.pop(sorted(store.values)[number])
        search, load = (moved(store, pool, 64, step) for step in ("searches", "loads"))
        assert search.found[0].sum() == load.found[0].sum() == 3
        assert lost not in store.values.values()
    (kept,) = all_blocks(pool, 4)
    assert kept.tobytes() == contents.astype(FLOAT).tobytes()


@pytest.mark.parametrize("page_sizes", [(16, 64), (64, 32)])
@pytest.mark.parametrize("chips", [(1, 4), (4, 2)])
def test_states_of_other_chips_come_back_at_ends_of_both_pages(
    chips: tuple[int, int], page_sizes: tuple[int, int]
) -> None:
    layout = StatePoolLayout(NUM_LAYERS, RECURRENCE, FLOAT, FLOAT)
    rng = np.random.default_rng(3)
    own, size = RECURRENCE, page_sizes[0]
    conv = rng.standard_normal(
        (NUM_TOKENS // 16, NUM_LAYERS, own.conv_size - 1, own.chip_channels(1))
    )
    matrices = rng.standard_normal(
        (NUM_TOKENS // 16, NUM_LAYERS, own.num_value_heads, own.key_dim, own.value_dim)
    )

    def state_pool(tp_size: int, page_size: int) -> BlockPool:
        mesh = mesh_of(tp_size)
        shapes = state_pool_shapes(layout, 1, mesh)
        return BlockPool(shapes, layout.chip_views, NUM_TOKENS // page_size + 1, mesh)

    def states(tp_size: int, page_size: int) -> list[NDArray[Any]]:
        """The states after each page, as the chips hold them."""
        ends = slice(page_size // 16 - 1, None, page_size // 16)
        by_chip = np.split(conv[ends].astype(FLOAT), tp_size, axis=-1)
        rows = layout.slot_shapes(tp_size).conv[0] // tp_size
        parts = [part.reshape(*part.shape[:2], rows, -1) for part in by_chip]
        return [np.concatenate(parts, axis=2), matrices[ends].astype(FLOAT)]

    store = Store()
    source, target = (state_pool(*each) for each in zip(chips, page_sizes, strict=True))
    fill(source, states(chips[0], size))
    assert moved(store, source, size, "puts").succeeded
    (is_found,) = moved(store, target, page_sizes[1], "loads").found
    ends = np.arange(1, len(is_found) + 1) * page_sizes[1]
    assert is_found.tolist() == (ends % size == 0).tolist()
    for got, expected in zip(
        all_blocks(target, len(ends)), states(chips[1], page_sizes[1]), strict=True
    ):
        assert got[is_found].tobytes() == expected[is_found].tobytes()


def test_a_value_of_another_length_changes_nothing() -> None:
    pool, _ = kv_pool(KINDS["K and V"], 2, 32)
    fill(pool, [np.ones((8, *pool._values[0].shape[1:]), FLOAT)])
    before = pool.values(0, 1)
    assert not pool.set_values(0, 1, [before[0], before[1][:-4]])
    assert pool.values(0, 1) == before
    assert pool.set_values(0, 1, before[::-1])


HEADS = Heads(num_q=8, num_stored_kv=2, num_kv=4, head_dim=6)
SOURCES = {
    "Q, K and V with copies": Stacked(("0.", "1."), FusedHeads(("q", "k", "v"), (10,), HEADS)),
    "K and V of copies": HeadVectors("k", 2, 4, tuple(range(6))),
    "rows that padding ends": Padded(Tensor("rows", (7, 5)), 8, 0),
    "columns that padding ends": Swapped(Padded(Tensor("rows", (7, 5)), 8, 0)),
    "columns with padding on every mesh": Padded(
        Padded(Tensor("rows", (7, 5)), 6, 1, on_every_mesh=True), 8, 0
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_weights_have_the_fingerprint_of_one_chip(name: str) -> None:
    source = SOURCES[name]
    rng = np.random.default_rng(0)
    plain = jax.numpy.asarray(rng.standard_normal(source.plain_shape).astype(FLOAT))
    fitted, places = source.fit(plain), source.plain_places()
    assert fitted.shape != plain.shape
    expected = weights_fingerprint([(plain, None)])
    assert weights_fingerprint([(fitted, places)]) == expected
    assert weights_fingerprint([(fitted, None)]) != expected
    changed = source.fit(plain.at[(-1,) * plain.ndim].add(1))
    assert weights_fingerprint([(changed, places)]) != expected


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_kv_has_one_fingerprint_on_any_number_of_chips(family: str) -> None:
    """On 4 chips, heads have copies and a vocabulary may have padding."""
    prints = set()
    for tp_size in (1, 2, 4):
        args = ServerArgs(
            model_path=str(Path(__file__).parents[1] / "golden" / family),
            device="cpu",
            tp_size=tp_size,
            warmup="none",
            context_length=128,
            max_total_tokens=256,
            enable_hierarchical_cache=True,
        )
        executor = ModelExecutor(args)
        prints.add(executor._kv_fingerprint())
        executor.close()
    assert len(prints) == 1


def test_deterministic_inference_finds_only_kv_of_its_own_sizes(
    make_args: Callable[..., ServerArgs],
) -> None:
    def layout(**settings: Any) -> str:
        args = make_args(**settings)
        return EngineConfig.resolve(args, ModelConfig.from_path(args.model_path), "cpu").kv_layout

    for is_fixed in (False, True):
        own = {"enable_deterministic_inference": is_fixed}
        given = layout(**own, page_size=16)
        assert (layout(**own, page_size=32) == given) == (not is_fixed)
        assert (layout(**own, page_size=16, tp_size=2) == given) == (not is_fixed)
    assert layout(kv_cache_dtype="fp8_e4m3") != layout()
