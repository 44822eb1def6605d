"""The rule of lookbacks, written down by force: every cached prefix by itself, and no tree.

A prefix of whole pages is *on the tree* if it is here. Each has, per cache group, the page that
holds its last page of tokens, or none. The four sentences of the specification are the methods:

1. `can_resume`: all values in the lookback are there. `longest_match`: the deepest such prefix.
2. `locked`: a lease that ends at l locks these values, no others.
3. `drop_dead`: a value that no position needs that can be resumed goes, unless it is locked.
4. `insert`: what is missing is filled.
"""

from collections.abc import Sequence
from functools import lru_cache

from sgl_jax.core.engine_sizes import CacheGroup
from tests.mem_cache.tree_model import Tokens


class Lock:
    """What the lease at the end of `prefix` still holds: of each group, pages from `firsts` on."""

    def __init__(self, prefix: Tokens, firsts: list[int]) -> None:
        self.prefix = prefix
        self.firsts = firsts


@lru_cache(1 << 16)
def prefixes_of(tokens: Tokens, page_size: int, first_end: int) -> list[Tokens]:
    """The prefixes of whole pages with at least `first_end` tokens; not to be changed."""
    return [tokens[:end] for end in range(first_end, len(tokens) + 1, page_size)]


class LookbackModel:
    """`pages[prefix][group]` is the page of the prefix's last page of tokens, 0 for none."""

    def __init__(self, groups: Sequence[CacheGroup], page_size: int) -> None:
        self.groups = groups
        self.page_size = page_size
        self.pages: dict[Tokens, list[int]] = {}
        self.locks: list[Lock] = []
        self._lookbacks: dict[Tokens, list[list[Tokens]]] = {}  # of a prefix, once asked for

    def prefixes(self, tokens: Tokens) -> list[Tokens]:
        return prefixes_of(tokens, self.page_size, self.page_size)

    def first_read(self, group: int, length: int) -> int:
        """The first page that the token after `length` reads."""
        window = self.groups[group].sliding_window
        return 0 if window is None else max(length - window + 1, 0) // self.page_size

    def lookback(self, group: int, prefix: Tokens) -> list[Tokens]:
        """The prefixes whose values are read to go on from `prefix`."""
        first_end = (self.first_read(group, len(prefix)) + 1) * self.page_size
        return prefixes_of(prefix, self.page_size, first_end)

    def lookbacks(self, prefix: Tokens) -> list[list[Tokens]]:
        """The lookback of each group."""
        found = self._lookbacks.get(prefix)
        if found is None:
            groups = range(len(self.groups))
            found = self._lookbacks[prefix] = [self.lookback(each, prefix) for each in groups]
        return found

    # 1. Position l of a path can be resumed if, for every component, all values in its lookback
    # are there. A hit is the deepest such l.

    def can_resume(self, prefix: Tokens) -> bool:
        if prefix not in self.pages:
            return False
        for group, lookback in enumerate(self.lookbacks(prefix)):
            for each in lookback:
                if not self.pages[each][group]:
                    return False
        return True

    def longest_match(self, tokens: Tokens) -> Tokens:
        return next(filter(self.can_resume, reversed(self.prefixes(tokens))), ())

    # 2. A lease that ends at l locks exactly these intervals, less what it has freed.

    def locked(self) -> list[set[Tokens]]:
        """Of each group, the prefixes whose values leases hold."""
        held: list[set[Tokens]] = [set() for _ in self.groups]
        for lock in self.locks:
            prefixes = self.prefixes(lock.prefix)
            for group, first in enumerate(lock.firsts):
                first = max(first, self.first_read(group, len(lock.prefix)))
                held[group].update(prefixes[first:])
        return held

    def locked_paths(self) -> set[Tokens]:
        return {each for lock in self.locks for each in self.prefixes(lock.prefix)}

    # 3. A value that no reachable position needs is dead.

    def drop_dead(self) -> None:
        """Everything dead leaves that no lease holds: values, and tokens that lead nowhere."""
        ends = list(filter(self.can_resume, self.pages))
        windows = [group for group, each in enumerate(self.groups) if each.sliding_window]
        needed = {g: {each for end in ends for each in self.lookbacks(end)[g]} for g in windows}
        leading = self.locked_paths().union(*map(self.prefixes, ends))
        held = self.locked()
        for prefix in list(self.pages):
            if prefix not in leading:
                del self.pages[prefix]
                continue
            for group in windows:
                if prefix not in needed[group] and prefix not in held[group]:
                    self.pages[prefix][group] = 0

    # 4. Insert fills what is missing, so a tombstone heals.

    def insert(self, tokens: Tokens, offered: list[list[int]], owned_from: int) -> None:
        """`offered[group][i]` is the page of the i-th page of tokens, 0 for none; those from
        `owned_from` tokens on may be taken."""
        for i, prefix in enumerate(self.prefixes(tokens)):
            values = self.pages.setdefault(prefix, [0] * len(self.groups))
            if i * self.page_size >= owned_from:
                for group, pages in enumerate(offered):
                    values[group] = values[group] or pages[i]

    # -- accounts ---------------------------------------------------------------------------

    def counts(self, pool: int) -> tuple[int, int]:
        """Pages of the pool that are (evictable, protected)."""
        held = [
            prefix in locked
            for group, locked in enumerate(self.locked())
            if self.groups[group].pool == pool
            for prefix, values in self.pages.items()
            if values[group]
        ]
        return held.count(False), held.count(True)

    def remove_evicted(self, remaining: dict[Tokens, list[int]]) -> None:
        """Accept an eviction: nothing locked is gone, FULL left from the leaves up, and no value
        has changed but to none."""
        locked, locked_paths = self.locked(), self.locked_paths()
        for prefix, values in list(self.pages.items()):
            if prefix not in remaining:
                assert prefix not in locked_paths, "eviction took a locked path"
                del self.pages[prefix]
                continue
            for group, page in enumerate(values):
                if remaining[prefix][group] != page:
                    assert remaining[prefix][group] == 0, "eviction changed what it kept"
                    assert self.groups[group].sliding_window, "eviction left tokens without FULL"
                    assert prefix not in locked[group], "eviction took what is locked"
                    values[group] = 0
        assert remaining.keys() == self.pages.keys(), "eviction made something up"
        for prefix in self.pages:
            assert len(prefix) == self.page_size or prefix[: -self.page_size] in self.pages
