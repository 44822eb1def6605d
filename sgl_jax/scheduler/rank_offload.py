"""Finds prefixes of requests in the host memory of one rank, and fetches them.

`CpuTier` moves the prefixes. Without host memory nothing is found, and nothing moves.
"""

from collections.abc import Callable, Iterator

from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import Int32Array
from sgl_jax.mem_cache.memory_view import CpuPoolView
from sgl_jax.mem_cache.offload.cpu_ledger import audit_cpu_slices, audit_cpu_tier, check_cpu_balance
from sgl_jax.mem_cache.offload.cpu_tier import CpuTier
from sgl_jax.mem_cache.offload.load_prices import PrefixElsewhere
from sgl_jax.mem_cache.offload.remote_tier import RemoteTier, Waiter
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.request import Request

# Fetches for one request: a second one if the pages of its prefix were evicted meanwhile.
_MAX_FETCHES = 2


class RankOffload:
    """The host memory of the rank of `memory`.

    Attributes:
        tier: the prefixes there; None without host memory.
    """

    def __init__(self, memory: RankMemory, args: SchedulerArgs) -> None:
        self._memory = memory
        self._waits_for_store = args.hicache_storage_prefetch_policy != "best_effort"
        self.tier: CpuTier | None = None
        if memory.sizes.host_blocks:
            self.tier = CpuTier(
                memory,
                args.hicache_write_policy,
                args.radix_eviction_policy,
                loads_all=args.hicache_fetch_policy == "always",
                has_store=args.hicache_storage_backend != "none",
            )

    @property
    def store(self) -> RemoteTier | None:
        return self.tier.store if self.tier is not None else None

    # -- prefixes of requests -----------------------------------------------------------------

    def num_here(self, request: Request) -> int:
        """Return the number of tokens of the request's prefix in host memory."""
        tier = self.tier
        return 0 if tier is None else tier.blocks.cache.peek(request.matchable(), request.namespace)

    def num_spared(self, request: Request, num_read: int) -> int:
        """Return the prompt tokens of computation that a fetch would save, less its cost."""
        if self.tier is None or request.num_fetches >= _MAX_FETCHES:
            return 0
        price = min(self.tier.prices.tokens_per_fetched, 1.0)
        return int(max(self.num_here(request) - num_read, 0) * (1.0 - price))

    def fetch_for(
        self,
        request: Request,
        num_read: int,
        num_ahead: int,
        make_room: Callable[[int], None],
    ) -> tuple[int, int] | None:
        """Fetch a fitting request's prefix if faster than computing it.

        The device has `num_read` tokens of it; computing the rest would wait for `num_ahead` prompt
        tokens. `make_room` frees device memory for a prefix of the given number of tokens. Returns
        the row that gets the prefix and its length after the fetch; None if nothing is fetched.
        """
        tier, tokens, namespace = self.tier, request.matchable(), request.namespace
        if tier is None:
            return None
        found = tier.fetch_of(tokens, namespace, num_read)
        if found is not None or request.num_fetches >= _MAX_FETCHES:
            return found
        length = tier.blocks.cache.peek(tokens, namespace)
        num_saved = length - num_read
        num_fetched = num_saved + tier.num_moving_tokens
        prefix = PrefixElsewhere(num_read, num_saved, len(request.tokens), num_ahead, num_fetched)
        if num_saved <= 0 or not tier.prices.chooses(prefix):
            return None
        make_room(length)
        fetch = tier.begin_fetch(tokens, namespace)
        if fetch is None:
            return None
        request.num_fetches += 1
        return fetch.lease.row, len(fetch.tokens)

    def search_store(self, request: Request, num_ahead: int) -> None:
        """Look up in the store the part of the request's prefix missing on device and host. Load it
        if faster than computing it after `num_ahead` prompt tokens, less those being loaded."""
        if self.store is None:
            return
        tokens, namespace = request.matchable(), request.namespace
        num_here = self.num_here(request)
        num_read = max(num_here, self._memory.cache.peek(tokens, namespace))
        if num_read + self._memory.page_size <= len(tokens):
            num_ahead = max(num_ahead - self.store.num_loading_tokens, 0)
            waiter = Waiter(request.rid, num_read, len(request.tokens), num_ahead)
            self.store.search(waiter, tokens, namespace, num_here)

    def awaits_store(self, request: Request) -> bool:
        """Return whether the request waits for a pending lookup or load on this rank."""
        if self.store is None or not self._waits_for_store:
            return False
        return request.rid in self.store.pending

    def withdraw(self, tokens: Int32Array, namespace: str, length: int) -> None:
        """Make at most `length` tokens of the prefix `tokens` available from host memory."""
        if self.tier is not None:
            self.tier.withdraw(tokens, namespace, length)

    # -- transfers ----------------------------------------------------------------------------

    @property
    def num_fetches(self) -> int:
        """Return the number of fetches in flight; each has a lease."""
        return len(self.tier.fetches) if self.tier is not None else 0

    def fetching_rows(self) -> list[int]:
        """Return the joint rows of fetches in flight."""
        fetches = self.tier.fetches.values() if self.tier is not None else ()
        return [self._memory.rows.first_row + fetch.lease.row for fetch in fetches]

    def drop_fetches(self) -> bool:
        """Free the pages taken by fetches; return whether there were any."""
        return self.tier is not None and self.tier.drop_fetches()

    # -- resets and views ---------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all prefixes in host memory."""
        if self.tier is not None:
            self.tier.reset()

    def forget(self) -> None:
        """Drop all records of host memory after a reset of the executor."""
        if self.tier is not None:
            self.tier.forget()

    def check_balance(self) -> None:
        """Check the counts of blocks. Raises `LedgerError`."""
        if self.tier is not None:
            check_cpu_balance(self.tier)

    def audit(self) -> None:
        """Check by a full walk that every block has one owner. Raises `LedgerError`."""
        if self.tier is not None:
            audit_cpu_tier(self.tier)

    def audit_slices(self) -> Iterator[None]:
        """Run the same check in slices, between which steps may run."""
        if self.tier is not None:
            yield from audit_cpu_slices(self.tier)

    def views(self) -> list[CpuPoolView]:
        """Return the blocks of each pool by state."""
        return self.tier.blocks.views() if self.tier is not None else []

    def counters(self) -> dict[str, int]:
        tier, store = self.tier, self.store
        return {
            "host_copied_pages": tier.num_copied_pages if tier else 0,
            "host_fetched_tokens": tier.num_fetched_tokens if tier else 0,
            "host_failed_transfers": tier.num_failed if tier else 0,
            "store_put_blocks": store.writes.num_blocks if store else 0,
            "store_loaded_tokens": store.num_loaded_tokens if store else 0,
        }
