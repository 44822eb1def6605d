"""The host memories of all ranks, and the store below them.

Handles the events of their transfers, looks up the prefixes of new requests, and hands out the
transfers that the ranks want.
"""

from collections.abc import Sequence
from itertools import chain
from typing import assert_never

from sgl_jax.core.transfers import Transfers
from sgl_jax.mem_cache.offload.remote_tier import RemoteTier
from sgl_jax.mem_cache.offload.saved_prefixes import SavedPrefix, SavedTree, save_tree, tree_of
from sgl_jax.scheduler import events
from sgl_jax.scheduler.ranks import Ranks
from sgl_jax.scheduler.request import Request, RequestState
from sgl_jax.scheduler.waiting.waiting_queue import WaitingQueue


class Offload:
    """The host memories of `ranks`; without any, nothing is found and nothing moves.

    Attributes:
        has_store: whether prefixes are also written to a store.
        num_store_failures: times that the store stopped answering.
    """

    def __init__(self, ranks: Ranks, waiting: WaitingQueue) -> None:
        """Start without transfers; `waiting` are the requests without memory."""
        self._ranks, self._tiers, self._waiting = ranks.ranks, ranks.host_tiers, waiting
        self.has_store = bool(self._stores())
        self.num_store_failures = 0

    def handle(self, event: events.OffloadEvent) -> None:
        match event:
            case events.TransferEnded():
                self._tiers[event.end.dp_rank].ended(event.end)
                self._release(event.end.dp_rank)
            case events.StoreOverdue():
                store = self._tiers[event.dp_rank].store
                assert store is not None, "only the store makes a request wait"
                store.overdue(event.number)
                self._release(event.dp_rank)
            case events.StoreSuspended():
                self.num_store_failures += not event.answers
                for store in self._stores():
                    store.is_suspended = not event.answers
            case events.PrefillRate():
                for tier in self._tiers:
                    tier.prices.prefill_rate = event.tokens_per_s
            case events.FetchRate():
                for tier in self._tiers:
                    tier.prices.fetch.start(event.tokens_per_s)
            case events.StoreRate():
                for tier in self._tiers:
                    tier.prices.store.start(event.tokens_per_s)
            case _:
                assert_never(event)

    def _stores(self) -> list[RemoteTier]:
        """Return the parts of the store. A reset of the devices replaces them."""
        return [tier.store for tier in self._tiers if tier.store is not None]

    def _release(self, dp_rank: int) -> None:
        """Recheck requests after a pending lookup or load of their prefix ended."""
        store = self._tiers[dp_rank].store
        for rid in store.take_released() if store is not None else ():
            self._waiting.note_event(rid)

    def search_store(self, request: Request | None) -> None:
        """Look up a new request's prefix in the store, on the rank with most of it in host memory,
        else with the fewest running requests. None: it was refused."""
        if request is None or request.state is not RequestState.WAITING:
            return
        pinned = request.message.dp_rank
        ranks = self._ranks if pinned is None else [self._ranks[pinned]]
        best = max(
            ranks,
            key=lambda rank: (rank.host.num_here(request), -len(rank.running), -rank.dp_rank),
        )
        num_waiting = self._waiting.num_uncached_tokens(request, best.dp_rank)
        num_ahead = best.num_prompt_tokens_left + num_waiting // len(self._ranks)
        best.host.search_store(request, num_ahead)
        self._waiting.note_event(request.rid)

    def restore(self, prefixes: Sequence[SavedPrefix]) -> None:
        """Load a share of the saved prefixes on each rank."""
        for dp_rank, store in enumerate(self._stores()):
            store.restore(prefixes[dp_rank :: len(self._ranks)])

    def saved_trees(self) -> list[SavedTree]:
        """Return the prefixes of each rank with host memory, and those still to be loaded there."""
        trees = [save_tree(tier.blocks.cache) for tier in self._tiers]
        return trees + [tree_of(store.waiting_restores) for store in self._stores()]

    @property
    def is_restoring(self) -> bool:
        """Return whether saved prefixes are still to be loaded."""
        return any(store.is_restoring for store in self._stores())

    @property
    def is_storing(self) -> bool:
        """Return whether prefixes are on their way to the store below the host memory."""
        return any(tier.is_storing for tier in self._tiers)

    @property
    def is_moving_out(self) -> bool:
        """Return whether prefixes move, or wait to move, to host memory or the store."""
        return any(tier.is_moving_out for tier in self._tiers)

    @property
    def has_transfers(self) -> bool:
        """Return whether `take_transfers` may return any."""
        return any(tier.has_work for tier in self._tiers)

    def take_transfers(self) -> Transfers:
        taken = [tier.take() for tier in self._tiers]
        return Transfers(*(tuple(chain(*each)) for each in zip(*taken, strict=True)))
