"""The cost of each choice between computing a prefix and loading it from host memory or the store.

Both times to the first token come from the simulation: the occupied link and store, and the steps
that would compute the tokens in addition to the rank's running rows. An oracle with both times
takes the faster option of each choice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from sgl_jax.bench.trace.host_link import STORE, HostLink
from sgl_jax.bench.trace.step_time import RankLoad, StepSeconds
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.mem_cache.lease import num_pages_read
from sgl_jax.mem_cache.offload.cpu_tier import CpuTier
from sgl_jax.mem_cache.offload.load_prices import PrefixElsewhere
from sgl_jax.scheduler.rank_scheduler import RankScheduler


class _Choice(NamedTuple):
    prefix: PrefixElsewhere
    loads: bool
    arrival_s: float  # until the prefix has arrived
    num_rows: int  # running on the rank
    kv_tokens: int  # of these rows


class LoadChoices:
    """The choices of ranks. `clock` returns the current time in seconds."""

    def __init__(
        self,
        link: HostLink,
        sizes: EngineSizes,
        step_seconds: StepSeconds,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._sizes = sizes
        self._step_seconds = step_seconds
        self._clock = clock
        self._made: list[_Choice] = []

    def watch(self, rank: RankScheduler) -> None:
        """Record the choices of `rank` from now on, without changing them."""
        tier = rank.host.tier
        assert tier is not None
        tier.prices.chooses = partial(self._choose, rank, tier)

    def _choose(self, rank: RankScheduler, tier: CpuTier, prefix: PrefixElsewhere) -> bool:
        loads = tier.prices.is_sooner(prefix)
        own, now_s, link = self._num_blocks(prefix.num_tokens), self._clock(), self._link
        moves = [[len(listed) for listed in move.pages] for move in tier.waiting_fetches]
        seconds = partial(link.seconds, rank.dp_rank)
        arrival_s = link.arrival_wait_s(rank.dp_rank, now_s) + sum(map(seconds, moves))
        if prefix.num_loaded and tier.store is not None:
            moves = [[len(listed) for listed in move.blocks] for move in tier.store.waiting_loads]
            load_s = sum(link.seconds(STORE, each) for each in (*moves, own))
            arrival_s = max(arrival_s, link.arrival_wait_s(STORE, now_s) + load_s)
        arrival_s += seconds(own)
        rows = rank.running.active
        kv_tokens = int(rank.columns.known_len[rows].sum())
        self._made.append(_Choice(prefix, loads, arrival_s, len(rows), kv_tokens))
        return loads

    def _num_blocks(self, num_tokens: int) -> list[int]:
        """Return the blocks of each pool for a prefix of `num_tokens`."""
        counts = [0] * len(self._sizes.host_blocks)
        for group in self._sizes.groups:
            counts[group.pool] += num_pages_read(group, self._sizes.page_size, num_tokens)
        return counts

    def totals(self, *, from_store: bool) -> dict[str, float]:
        """Return the number of choices about the store or host memory, and the total seconds to the
        first tokens by rule."""
        made = [choice for choice in self._made if bool(choice.prefix.num_loaded) == from_store]
        chosen_s = oracle_s = load_s = compute_s = 0.0
        for choice in made:
            by_load, by_compute = self._priced(choice)
            chosen_s += by_load if choice.loads else by_compute
            oracle_s += min(by_load, by_compute)
            load_s += by_load
            compute_s += by_compute
        return {
            "choices": len(made),
            "loaded": sum(choice.loads for choice in made),
            "chosen_s": chosen_s,
            "oracle_s": oracle_s,
            "always_s": load_s,
            "never_s": compute_s,
        }

    def _priced(self, choice: _Choice) -> tuple[float, float]:
        """Return the seconds to the first token by loading, and by computing."""
        start, num_tokens, prompt_len, num_ahead, *_ = choice.prefix
        end = start + num_tokens
        load_s = max(choice.arrival_s, self._compute_s(choice, [(0, num_ahead)]))
        load_s += self._compute_s(choice, [(end, prompt_len - end)])
        return load_s, self._compute_s(choice, [(0, num_ahead), (start, prompt_len - start)])

    def _compute_s(self, choice: _Choice, prompts: Sequence[tuple[int, int]]) -> float:
        """Return the time of steps that compute parts of prompts (start, length), in addition to
        the running rows."""
        most = self._sizes.max_chunk_tokens
        steps, room = list[list[tuple[int, int]]](), 0
        for start, num_tokens in prompts:
            end = start + num_tokens
            while start < end:
                if room == 0:
                    steps.append([])
                    room = most
                taken = min(room, end - start)
                steps[-1].append((start, taken))
                start, room = start + taken, room - taken
        return sum(self._step_seconds([_load(choice, chunks)]) for chunks in steps)


def _load(choice: _Choice, chunks: Sequence[tuple[int, int]]) -> RankLoad:
    return RankLoad(
        decode_rows=choice.num_rows,
        decode_kv_tokens=choice.kv_tokens,
        prefill_tokens=sum(length for _, length in chunks),
        prefill_kv_tokens=sum(start + length for start, length in chunks),
        prefill_pairs=sum(length * start + length * (length + 1) // 2 for start, length in chunks),
    )
