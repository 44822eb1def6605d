"""Recorded prompts through the memory of a model with recurrent layers, one after another.

The prefix cache of such a model serves a prompt only as far as a snapshot of the states was kept.
It is compared with an oracle of the same KV that keeps the state after every page at no cost.
Prompts are computed in chunks, each published as it is computed; outputs are not kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sgl_jax.bench.trace.cache_only import Trace
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, prompt_tokens
from sgl_jax.core.engine_sizes import LAST_VALUE, CacheGroup, EngineSizes
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.ledger import audit
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import publish_prefix, release_kv_cache
from sgl_jax.mem_cache.row_states import take_snapshot_slot
from sgl_jax.planner.plot_file import figure_class, save_figure

_CHUNK_TOKENS = 2048
_FULL = CacheGroup(None)
_STATES = CacheGroup(LAST_VALUE, 1, (), True)


class RecurrentMix(NamedTuple):
    """The size of a snapshot, and the distance between two."""

    name: str
    snapshot_tokens: int  # tokens whose KV takes as many bytes
    interval: int  # tokens between snapshots; prompts' ends and branches have more

    def num_snapshots(self, kv_tokens: int, share: float) -> int:
        """Return the snapshots that take `share` of the bytes of the KV of `kv_tokens` tokens."""
        return max(int(share * kv_tokens) // self.snapshot_tokens, 1)


# 36 recurrent layers of 32 heads of 128 x 128 in float32 and their convolutions: 73.7 MiB; 12 full
# layers: 24 KiB a token.
QWEN3_NEXT = RecurrentMix("Qwen3-Next-80B-A3B", 3144, 4096)


class RecurrentRates(NamedTuple):
    """Shares of prompt tokens served, by the oracle and by snapshots' bytes over the KV's bytes."""

    oracle: float
    by_share: dict[float, float]


def recurrent_hit_rates(
    trace: Trace,
    capacity: int,
    shares: Sequence[float],
    mix: RecurrentMix = QWEN3_NEXT,
    *,
    page_size: int,
    policy: str,
) -> RecurrentRates:
    """Return hit rates with snapshots of shares of the KV's bytes, and with all states.

    `capacity` counts blocks of 512 tokens of KV; longer prompts are left out.
    """
    if BLOCK_TOKENS % page_size:
        raise ValueError(f"the page size must divide {BLOCK_TOKENS}, got {page_size}")
    kv_tokens = capacity * BLOCK_TOKENS
    prompts = [prompt_tokens(each) for each in trace if len(each.block_ids) <= capacity]
    longest = max((len(prompt) for prompt in prompts), default=0) + page_size
    total = sum(request.input_len for request in trace)

    def rate(num_snapshots: int | None) -> float:
        replay = StatesReplay(
            kv_tokens // page_size,
            num_snapshots,
            page_size,
            longest,
            interval=mix.interval,
            policy=policy,
        )
        return replay.serve_all(prompts) / total

    by_share = {share: rate(mix.num_snapshots(kv_tokens, share)) for share in shares}
    return RecurrentRates(rate(None), by_share)


class StatesReplay:
    """The memory of one rank with `num_pages` pages, and one request at a time.

    `num_snapshots` None is the oracle, which needs no state.
    """

    def __init__(
        self,
        num_pages: int,
        num_snapshots: int | None,
        page_size: int,
        longest: int,
        *,
        interval: int,
        policy: str = "adaptive",
    ) -> None:
        pools: tuple[int, ...] = (1 + num_pages,)
        groups: tuple[CacheGroup, ...] = (_FULL,)
        if num_snapshots is not None:
            pools, groups = (*pools, 1 + num_snapshots), (*groups, _STATES)
        self.sizes = EngineSizes(
            dp_size=1,
            page_size=page_size,
            pool_pages=pools,
            num_rows=2,
            max_context_len=longest,
            max_step_tokens=_CHUNK_TOKENS,
            max_prompt_logprob_tokens=1,
            vocab_size=1,
            groups=groups,
            snapshot_interval=interval,
            tail_interval=interval,
            max_step_snapshots=_CHUNK_TOKENS // page_size,
        )
        self.memory = RankMemory(0, self.sizes, eviction_policy=policy)

    def serve_all(self, prompts: Iterable[Int32Array]) -> int:
        """Serve each prompt; return the prompt tokens found. Check the memory at the end."""
        num_found = sum(map(self.serve, prompts))
        audit(self.memory, 0)
        return num_found

    def serve(self, tokens: Int32Array) -> int:
        """Match a prompt, compute the rest in chunks, and keep it; return the tokens found."""
        memory, matchable = self.memory, tokens[:-1]
        wanted = self._lengths_to_keep(matchable)
        lease = memory.open_lease(matchable)
        found = length = lease.kv_committed_len
        while length < len(tokens):
            end = min(length // _CHUNK_TOKENS * _CHUNK_TOKENS + _CHUNK_TOKENS, len(tokens))
            fits = memory.grow_row(lease.row, end)
            assert fits, "a prompt within the capacity fits once all others are evicted"
            if memory.state_group is not None:
                for kept in sorted(each for each in wanted if length < each <= end):
                    take_snapshot_slot(memory, lease.row, kept)
            memory.commit_rows(np.array([lease.row]), np.array([end]))
            publish_prefix(memory, lease, tokens)
            length = end
        release_kv_cache(memory, lease, tokens, insert=True)
        return found

    def _lengths_to_keep(self, matchable: Int32Array) -> set[int]:
        """Return the lengths with a snapshot, as in an engine: the last whole page, the branch off
        the tree, and each multiple of the interval."""
        page_size, interval = self.sizes.page_size, self.sizes.snapshot_interval
        _, branch = self.memory.cache.tree.walk(matchable, "")
        tail = len(matchable) // page_size * page_size
        return {tail, branch, *range(interval, len(matchable) + 1, interval)}


def recurrent_table(rates: Mapping[int, RecurrentRates]) -> str:
    """Return a line for each capacity and share of snapshots."""
    lines = [f"{'blocks of 512':>13}  {'bytes to KV':>11}  {'all states':>10}  found  ratio"]
    for blocks, of_blocks in rates.items():
        for share, rate in of_blocks.by_share.items():
            ratio = rate / of_blocks.oracle if of_blocks.oracle else 1.0
            lines.append(
                f"{blocks:>13,}  {share:>11g}  {of_blocks.oracle:>10.3f}  {rate:.3f}  {ratio:.2f}"
            )
    return "\n".join(lines)


def plot_shares(rates: Mapping[int, RecurrentRates], title: str, path: Path) -> None:
    """Draw the share found over the memory of snapshots, for each capacity in blocks."""
    figure = figure_class()(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (blocks, of_blocks) in enumerate(rates.items()):
        colour = f"C{number}"
        shares, found = list(of_blocks.by_share), list(of_blocks.by_share.values())
        axes.plot(shares, found, "o-", color=colour, label=f"KV of {blocks:,} blocks")
        axes.axhline(of_blocks.oracle, color=colour, ls="--", lw=1, label="... and all states")
    axes.set(xlabel="bytes of snapshots to bytes of KV", ylabel="share of prompt tokens found")
    axes.set(xlim=(0, None), ylim=(0, None), title=title)
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)
