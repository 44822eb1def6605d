"""Moves prefixes between a rank's blocks in CPU memory and the store.

Out: each prefix that CPU memory gains is written to the store (`store_writes.py`). In: when a
request arrives, the store looks up the request's pages that neither the device nor CPU memory has.
The found pages are *loaded* into blocks, and their prefix is then cached like any other. A request
may wait for that (`pending`).

A key of the store depends on all tokens up to a page's end, so no lookup needs a tree.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.core.transfers import Keys, StoreTransfer, TransferEnd
from sgl_jax.mem_cache.offload.content_keys import ContentKeys
from sgl_jax.mem_cache.offload.cpu_pool import CpuPool
from sgl_jax.mem_cache.offload.load_prices import LoadPrices, PrefixElsewhere
from sgl_jax.mem_cache.offload.saved_prefixes import SavedPrefix
from sgl_jax.mem_cache.offload.store_writes import StoreWrites, add_keys, store_transfer
from sgl_jax.mem_cache.tree.window_component import lookback_pages

# Begin one in this many loads that computing would beat, to keep the measured rate of the store
# current. No request waits for it.
_MEASURED_REFUSALS = 16
# Saved prefixes loaded at the same time.
_MAX_RESTORED = 4


class Waiter(NamedTuple):
    """A request that waits for its prefix from the store."""

    rid: str
    num_read: int  # tokens of the prefix in CPU memory or on the device
    prompt_len: int
    num_ahead: int  # prompt tokens of further requests that would be computed before it


class _Load(NamedTuple):
    """A lookup or a load, for a request or (without a `waiter`) for a saved prefix."""

    waiter: Waiter | None
    tokens: Int32Array  # whole pages
    namespace: str
    keys: Keys  # [groups, pages, bytes], from page `first` on
    first: int
    is_moved: BoolArray  # [groups, pages], from page `first` on: the values to move
    is_load: bool = False


class _Dependent(NamedTuple):
    """A request that waits for another request's lookup or load."""

    waiter: Waiter
    tokens: Int32Array  # whole pages
    namespace: str


class RemoteTier:
    """The remote tier: a store below the host memory of `blocks`.

    Attributes:
        pending: ids of requests with a pending lookup or load.
        writes: the blocks that are written to the store.
        num_loaded_tokens: tokens loaded since the start.
        misses: lookups without anything to load since the start, by reason.
        is_suspended: whether the store does not respond. Then no lookup or write begins.
        withdrawn: keys of pages, oldest first. Their values in the store may not be finite, so no
            load reads them.
    """

    def __init__(
        self,
        blocks: CpuPool,
        groups: Sequence[CacheGroup],
        prices: LoadPrices,
        next_number: Callable[[], int],
    ) -> None:
        """Create a tier for blocks of these layer groups; `next_number` numbers transfers."""
        self._prices = prices
        self._blocks = blocks
        windows = [group.sliding_window for group in groups]
        self._full_groups = [i for i, window in enumerate(windows) if window is None]
        # By group: the number of pages before a position that its next token reads.
        self._lookbacks = {
            i: lookback_pages(window, blocks.page_size)
            for i, window in enumerate(windows)
            if window is not None
        }
        self._num_groups = len(groups)
        self._keys = ContentKeys(blocks.page_size, len(groups))
        self._next_number = next_number
        self.pending: set[str] = set()
        self._released: list[str] = []  # ids removed from `pending` since the last take
        self.num_loaded_tokens = 0
        self.misses = Counter[str]()
        self.is_suspended = False
        self._moving: dict[int, _Load] = {}  # lookups and loads, by transfer number
        self._under_way: dict[bytes, int] = {}  # the same, by the key of their first page
        # By transfer number.
        self._dependents: defaultdict[int, list[_Dependent]] = defaultdict(list)
        self.writes = StoreWrites(blocks, self._keys, next_number)
        self.withdrawn: dict[bytes, None] = {}
        self._num_refused = 0  # loads
        # Moves that the next `take` returns, and saved prefixes that wait to be loaded.
        self._searches: list[StoreTransfer] = []
        self.waiting_loads: list[StoreTransfer] = []
        self.waiting_restores: deque[SavedPrefix] = deque()

    def inherit(self, before: "RemoteTier") -> None:
        self.writes.num_blocks = before.writes.num_blocks
        self.num_loaded_tokens = before.num_loaded_tokens
        self.misses = before.misses
        self.is_suspended = before.is_suspended
        self.withdrawn = before.withdrawn

    @property
    def has_work(self) -> bool:
        has_moves = self._searches or self.waiting_loads or self.writes.begins
        return bool(has_moves) or self._may_restore

    @property
    def _may_restore(self) -> bool:
        has_slots = len(self._moving) < _MAX_RESTORED and not self.is_suspended
        return bool(self.waiting_restores) and has_slots

    @property
    def is_restoring(self) -> bool:
        may_come = self.waiting_restores and not self.is_suspended
        return bool(may_come or any(each.waiter is None for each in self._moving.values()))

    def take(self) -> Iterator[tuple[StoreTransfer, ...]]:
        """Return the lookups, loads and writes to begin now."""
        self._restore_some()
        begins = self._searches, self.waiting_loads, self.writes.begins
        self._searches, self.waiting_loads, self.writes.begins = [], [], []
        return map(tuple, begins)

    def may_write(self, num_blocks: int) -> bool:
        return not self.is_suspended and self.writes.has_room(num_blocks)

    def drop_writes(self) -> None:
        """Give up all writes, and saved prefixes still to be loaded. No write may still run."""
        self.writes.drop()
        self.waiting_restores.clear()

    # -- in ---------------------------------------------------------------------------------

    def withdraw(self, tokens: Int32Array, namespace: str, first: int) -> None:
        """Do not load the prefix `tokens` from page `first` on, until newer keys displace these."""
        add_keys(self.withdrawn, self._keys.of(tokens, namespace)[0, first:])

    def search(
        self,
        waiter: Waiter | None,
        tokens: Int32Array,
        namespace: str,
        num_here: int,
        *,
        follows: bool = True,
    ) -> None:
        """Look up the pages of a prefix after its `num_here` cached tokens.

        With `follows`, if a pending lookup or load starts at the same page, this lookup starts
        after that, so that no page is loaded twice. Without a `waiter`, the lookup is for a saved
        prefix.
        """
        page_size = self._blocks.page_size
        tokens = tokens[: len(tokens) // page_size * page_size].copy()
        first = num_here // page_size
        if first * page_size == len(tokens) or self.is_suspended:
            return
        if waiter is not None:
            page = self._keys.of(tokens[: (first + 1) * page_size], namespace)[0, -1]
            transfer = self._under_way.get(page.tobytes()) if follows else None
            if transfer is not None:
                self.pending.add(waiter.rid)
                self._dependents[transfer].append(_Dependent(waiter, tokens, namespace))
                return
            # For given rates, either the longest or the shortest part gains the most.
            ends = (first + 1, len(tokens) // page_size)
            if any(self._prices.is_sooner(self._part(waiter, first, end)) for end in ends):
                self.pending.add(waiter.rid)
            elif not self._measures_anew():
                return
        keys = self._keys.of(tokens, namespace)[:, first:]
        is_moved = np.ones(keys.shape[:2], np.bool_)
        search = _Load(waiter, tokens, namespace, keys, first, is_moved)
        self._searches.append(self._begin(self._next_number(), search))

    def _begin(self, number: int, each: _Load, blocks: Int32Array | None = None) -> StoreTransfer:
        """Begin a lookup, or a load into `blocks`; return its transfer."""
        self._moving[number] = each
        self._under_way.setdefault(_first_page(each), number)
        move = store_transfer(self._blocks, number, each.keys, each.is_moved, blocks)
        return move._replace(is_awaited=self._is_awaited(each))

    def _begin_load(self, search: _Load, is_found: BoolArray, end_of: TransferEnd) -> bool:
        """Load the found values of a lookup, up to the first page that a prefix lacks. Return False
        if there are none, free blocks are short, or computing them is sooner."""
        page_size, number = self._blocks.page_size, end_of.number
        is_offered = np.ones((self._num_groups, len(search.tokens) // page_size), np.bool_)
        is_offered[:, search.first :] = is_found
        end = self._resumable_end(is_offered, search.first)
        if end == search.first and end_of.succeeded:
            has_pages = self._num_whole(is_offered) > end
            reason = "page_size" if end_of.has_other_sizes else "absent"
            self.misses["not_resumable" if has_pages else reason] += 1
        tokens = search.tokens[: end * page_size]
        is_offered = is_offered[:, :end]
        is_offered[:, : search.first] = False
        for group, lookback in self._lookbacks.items():
            is_offered[group, : max(end - lookback, 0)] = False
        # CPU memory may have more or less of the prefix by now. Without its beginning, nothing of
        # the end can be kept.
        num_here = self._blocks.cache.peek(tokens, search.namespace) // page_size
        if not search.first <= num_here < end:
            return False
        waiter = search.waiter if self._is_awaited(search) else None
        if waiter is not None and not self._prices.chooses(self._part(waiter, num_here, end)):
            self._waits_no_more(search)
            if not self._measures_anew():
                return False
        blocks = self._blocks.begin_copy(number, tokens, search.namespace, is_offered)
        if blocks is None:
            return False
        keys = search.keys[:, num_here - search.first : end - search.first]
        blocks = blocks[:, num_here:]
        load = _Load(
            search.waiter, tokens, search.namespace, keys, num_here, blocks > 0, is_load=True
        )
        self.waiting_loads.append(self._begin(number, load, blocks))
        return True

    def _measures_anew(self) -> bool:
        """Count a load that computing would beat; return whether to begin it for measurement."""
        self._num_refused += 1
        return self._num_refused % _MEASURED_REFUSALS == 0

    def _part(self, waiter: Waiter, num_here: int, end: int) -> PrefixElsewhere:
        """Return pages `num_here` to `end` of a prefix, to be loaded after the pending loads."""
        page_size = self._blocks.page_size
        _, num_read, prompt_len, num_ahead = waiter
        start = max(num_read, num_here * page_size)
        num_tokens = end * page_size - start
        num_loaded = self.num_loading_tokens + (end - num_here) * page_size
        return PrefixElsewhere(start, num_tokens, prompt_len, num_ahead, num_tokens, num_loaded)

    @property
    def num_loading_tokens(self) -> int:
        page_size = self._blocks.page_size
        return sum(
            len(each.tokens) - each.first * page_size
            for each in self._moving.values()
            if each.is_load and self._is_awaited(each)
        )

    def _resumable_end(self, is_there: BoolArray, first: int) -> int:
        """Return the last position in bool[groups, pages], at least `first`, with all values that
        its next token reads. It is counted in pages."""
        end = self._num_whole(is_there)
        while end > first and not all(
            is_there[group, max(end - lookback, 0) : end].all()
            for group, lookback in self._lookbacks.items()
        ):
            end -= 1
        return max(end, first)

    def _num_whole(self, is_found: BoolArray) -> int:
        """Count the leading pages of bool[groups, pages] with all full-attention values."""
        is_whole = is_found[self._full_groups].all(axis=0)
        return int(np.argmin(np.append(is_whole, False)))

    def restore(self, prefixes: Sequence[SavedPrefix]) -> None:
        self.waiting_restores.extend(prefixes)

    def _restore_some(self) -> None:
        while self._may_restore:
            tokens, namespace = self.waiting_restores.popleft()
            num_here = self._blocks.cache.peek(tokens, namespace)
            num_pages = (len(tokens) - num_here) // self._blocks.page_size
            # Usually, this evicts no prefix cached since the start.
            if self._blocks.allocators[0].num_free >= num_pages:
                self.search(None, tokens, namespace, num_here)

    # -- ends -------------------------------------------------------------------------------

    def ended(self, end: TransferEnd) -> None:
        """Handle the end of a lookup, load or write. Ignore a transfer from before a reset."""
        number = end.number
        if number in self.writes.in_flight:
            self.writes.ended(number, succeeded=end.succeeded)
        elif number in self._moving:
            each = self._moving.pop(number)
            page = _first_page(each)
            if self._under_way.get(page) == number:
                del self._under_way[page]
            is_found = self._flags(each, end)
            if each.is_load:
                self._waits_no_more(each)
                num_pages = self._num_whole(is_found | ~each.is_moved)
                self._measure(each, is_found, end.seconds)
                is_found = is_found[:, :num_pages]
                self._blocks.end_copy(number, succeeded=num_pages > 0, is_found=is_found)
                self.num_loaded_tokens += num_pages * self._blocks.page_size
                self._search_for_dependents(number, follows=num_pages > 0)
                return
            is_found &= [key.tobytes() not in self.withdrawn for key in each.keys[0]]
            if not self._begin_load(each, is_found, end):
                self._waits_no_more(each)
                self._search_for_dependents(number, follows=False)

    def _measure(self, load: _Load, is_found: BoolArray, seconds: float) -> None:
        """Measure a load, which may have moved only some of its values in time."""
        share = np.count_nonzero(is_found) / np.count_nonzero(load.is_moved)
        num_tokens = len(load.tokens) - load.first * self._blocks.page_size
        if share:
            self._prices.store.add(seconds, share * num_tokens)

    def overdue(self, number: int) -> None:
        """Handle a lookup or load that takes too long: stop the wait of its requests."""
        late = self._moving.get(number)
        if late is not None:
            self._waits_no_more(late)
            self._take_dependents(number)

    def _take_dependents(self, number: int) -> list[_Dependent]:
        dependents = self._dependents.pop(number, [])
        for each in dependents:
            self._release(each.waiter)
        return dependents

    def _search_for_dependents(self, number: int, *, follows: bool) -> None:
        for waiter, tokens, namespace in self._take_dependents(number):
            num_here = self._blocks.cache.peek(tokens, namespace)
            # The prompts ahead have been computed in the meantime.
            waiter = waiter._replace(num_ahead=0)
            self.search(waiter, tokens, namespace, num_here, follows=follows)

    def _waits_no_more(self, load: _Load) -> None:
        if load.waiter is not None:
            self._release(load.waiter)

    def _release(self, waiter: Waiter) -> None:
        self.pending.discard(waiter.rid)
        self._released.append(waiter.rid)

    def take_released(self) -> list[str]:
        """Return the ids removed from `pending` since the last call; they may be in it again."""
        released, self._released = self._released, []
        return released

    def _is_awaited(self, load: _Load) -> bool:
        return load.waiter is not None and load.waiter.rid in self.pending

    def _flags(self, load: _Load, end: TransferEnd) -> BoolArray:
        """Return an end's flags as bool[groups, pages], False for values that were not moved."""
        flags = np.zeros(load.is_moved.shape, np.bool_)
        if end.succeeded:
            for numbers, found in zip(self._blocks.groups_of, end.found, strict=True):
                own = flags[numbers]
                own[load.is_moved[numbers]] = found
                flags[numbers] = own
        return flags


def _first_page(each: _Load) -> bytes:
    key: bytes = each.keys[0, 0].tobytes()
    return key
