"""Moves prefixes between a rank's blocks in CPU memory and the store.

Out: each prefix that CPU memory gains is written to the store, and stays locked until then. In:
when a request arrives, the store looks up the request's pages that neither the device nor CPU
memory has. The found pages are *loaded* into blocks, and their prefix is then cached like any
other. A request may wait for that (`pending`).

A key of the store depends on all tokens up to a page's end, so no lookup needs a tree.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from sgl_jax.core.engine_sizes import CacheGroup
from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.core.transfers import Keys, StoreTransfer, TransferEnd
from sgl_jax.mem_cache.offload.content_keys import ContentKeys
from sgl_jax.mem_cache.offload.cpu_pool import CpuPool
from sgl_jax.mem_cache.offload.load_prices import LoadPrices, PrefixElsewhere
from sgl_jax.mem_cache.offload.saved_prefixes import SavedPrefix
from sgl_jax.mem_cache.tree.window_component import lookback_pages

# Maximum blocks being written to the store. Further prefixes are written when they are offered to
# CPU memory again.
_MAX_PUT_BLOCKS = 4096
# Maximum pages that wait for that, and maximum withdrawn pages.
_MAX_LISTED_PAGES = 1 << 16
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


class _Put(NamedTuple):
    num_blocks: int
    pages: Keys  # keys of the first layer group


class _Begins(NamedTuple):
    """The last fields of `Transfers`: moves that the next `take` returns."""

    searches: list[StoreTransfer]
    loads: list[StoreTransfer]
    puts: list[StoreTransfer]


class _Dependent(NamedTuple):
    """A request that waits for another request's lookup or load."""

    waiter: Waiter
    tokens: Int32Array  # whole pages
    namespace: str


class RemoteTier:
    """The remote tier: a store below the host memory of `blocks`.

    Attributes:
        pending: ids of requests with a pending lookup or load.
        num_loaded_tokens, num_put_blocks: tokens loaded and blocks written since the start.
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
        self.num_put_blocks = 0
        self.is_suspended = False
        self._moving: dict[int, _Load] = {}  # lookups and loads, by transfer number
        self._under_way: dict[bytes, int] = {}  # the same, by the key of their first page
        # By transfer number.
        self._dependents: defaultdict[int, list[_Dependent]] = defaultdict(list)
        self._puts: dict[int, _Put] = {}
        # Keys of pages that the store lacks because their write failed or did not begin, oldest
        # first.
        self._left_out: dict[bytes, None] = {}
        self.withdrawn: dict[bytes, None] = {}
        self._num_refused = 0  # loads
        self._begins = _Begins([], [], [])
        self._restored: deque[SavedPrefix] = deque()

    def inherit(self, before: "RemoteTier") -> None:
        self.num_put_blocks = before.num_put_blocks
        self.num_loaded_tokens = before.num_loaded_tokens
        self.is_suspended = before.is_suspended
        self.withdrawn = before.withdrawn

    @property
    def puts(self) -> set[int]:
        return set(self._puts)

    @property
    def has_work(self) -> bool:
        return self._may_restore or any(self._begins)

    @property
    def _may_restore(self) -> bool:
        has_slots = len(self._moving) < _MAX_RESTORED and not self.is_suspended
        return bool(self._restored) and has_slots

    @property
    def is_restoring(self) -> bool:
        may_come = self._restored and not self.is_suspended
        return bool(may_come or any(each.waiter is None for each in self._moving.values()))

    def take(self) -> Iterator[tuple[StoreTransfer, ...]]:
        """Return the lookups, loads and writes to begin now."""
        self._restore_some()
        begins, self._begins = self._begins, _Begins([], [], [])
        return map(tuple, begins)

    # -- out --------------------------------------------------------------------------------

    def can_put(self, num_blocks: int) -> bool:
        if self.is_suspended:
            return False
        num_moving = sum(put.num_blocks for put in self._puts.values())
        return not num_moving or num_moving + num_blocks <= _MAX_PUT_BLOCKS

    def put(
        self, number: int | None, tokens: Int32Array, namespace: str, values: Int32Array
    ) -> None:
        """Write the last pages of a prefix to the store. `CpuPool.leaving` holds its lock.

        `values` int32[groups, n] are the blocks of the last n pages, 0 for values to leave out. If
        there is no room, `number` is None and the pages are written by a later `put_again`.
        """
        keys = self._keys.of(tokens, namespace)
        behind = keys[:, keys.shape[1] - values.shape[1] :]
        put = _Put(int(np.count_nonzero(values)), behind[0, values.any(axis=0)])
        if number is None:
            _add_keys(self._left_out, put.pages)
        else:
            self._puts[number] = put
            self._begins.puts.append(self._transfer(number, behind, values > 0, values))

    def put_again(self, tokens: Int32Array, namespace: str) -> None:
        """Write a prefix's pages that were left out before, as far as CPU memory has them."""
        if not self._left_out or self.is_suspended:
            return
        tokens = tokens[: self._blocks.cache.peek(tokens, namespace)]
        keys = self._keys.of(tokens, namespace)[0]
        is_left_out = np.array([key.tobytes() in self._left_out for key in keys], np.bool_)
        if not is_left_out.any():
            return
        number = self._next_number()
        values = self._blocks.begin_fetch(number, tokens, namespace)
        values[:, ~is_left_out] = 0
        if not self.can_put(int(np.count_nonzero(values))):
            self._blocks.end_fetch(number)
            return
        for key in keys[is_left_out]:
            del self._left_out[key.tobytes()]
        self.put(number, tokens, namespace, values)

    def drop_puts(self) -> None:
        """Undo the locks of all writes. No write may still run."""
        for number in self._puts:
            self._blocks.end_fetch(number)
        self._puts.clear()
        self._begins.puts.clear()
        self._left_out.clear()
        self._restored.clear()

    # -- in ---------------------------------------------------------------------------------

    def withdraw(self, tokens: Int32Array, namespace: str, first: int) -> None:
        """Do not load the prefix `tokens` from page `first` on, until newer keys displace these."""
        _add_keys(self.withdrawn, self._keys.of(tokens, namespace)[0, first:])

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
        self._begins.searches.append(self._begin(self._next_number(), search))

    def _begin(self, number: int, each: _Load, blocks: Int32Array | None = None) -> StoreTransfer:
        """Begin a lookup, or a load into `blocks`; return its transfer."""
        self._moving[number] = each
        self._under_way.setdefault(_first_page(each), number)
        move = self._transfer(number, each.keys, each.is_moved, blocks)
        return move._replace(is_awaited=self._is_awaited(each))

    @property
    def waiting_restores(self) -> list[SavedPrefix]:
        return list(self._restored)

    def _begin_load(self, number: int, search: _Load, is_found: BoolArray) -> bool:
        """Load the found values of a lookup, up to the first page that a prefix lacks. Return False
        if there are none, free blocks are short, or computing them is sooner."""
        page_size = self._blocks.page_size
        is_offered = np.ones((self._num_groups, len(search.tokens) // page_size), np.bool_)
        is_offered[:, search.first :] = is_found
        end = self._resumable_end(is_offered, search.first)
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
        self._begins.loads.append(self._begin(number, load, blocks))
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

    @property
    def waiting_loads(self) -> Sequence[StoreTransfer]:
        return self._begins.loads

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
        self._restored.extend(prefixes)

    def _restore_some(self) -> None:
        while self._may_restore:
            tokens, namespace = self._restored.popleft()
            num_here = self._blocks.cache.peek(tokens, namespace)
            num_pages = (len(tokens) - num_here) // self._blocks.page_size
            # Usually, this evicts no prefix cached since the start.
            if self._blocks.allocators[0].num_free >= num_pages:
                self.search(None, tokens, namespace, num_here)

    # -- ends -------------------------------------------------------------------------------

    def ended(self, end: TransferEnd) -> None:
        """Handle the end of a lookup, load or write. Ignore a transfer from before a reset."""
        number = end.number
        if number in self._puts:
            put = self._puts.pop(number)
            if end.succeeded:
                self.num_put_blocks += put.num_blocks
            else:
                _add_keys(self._left_out, put.pages)
            self._blocks.end_fetch(number)
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
            if not is_found.any() or not self._begin_load(number, each, is_found):
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

    def _transfer(
        self, number: int, keys: Keys, is_moved: BoolArray, blocks: Int32Array | None
    ) -> StoreTransfer:
        groups_of = self._blocks.groups_of
        return StoreTransfer(
            self._blocks.dp_rank,
            number,
            tuple(keys[numbers][is_moved[numbers]] for numbers in groups_of),
            ()
            if blocks is None
            else tuple(blocks[numbers][is_moved[numbers]] for numbers in groups_of),
        )


def _add_keys(listed: dict[bytes, None], keys: Keys) -> None:
    """Add keys [n, bytes] to `listed`, and remove the oldest keys above the limit."""
    listed.update(dict.fromkeys(key.tobytes() for key in keys))
    for key in list(islice(listed, max(len(listed) - _MAX_LISTED_PAGES, 0))):
        del listed[key]


def _first_page(each: _Load) -> bytes:
    key: bytes = each.keys[0, 0].tobytes()
    return key
