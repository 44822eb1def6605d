"""Finds stop strings in text that arrives piece by piece.

A hidden special token is searched for as a whole: in the text it is an unpaired surrogate, a
character that no token can write.
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

_HALVES = range(0xD800, 0xE000)  # more than the special tokens in any request's stop strings


def begin_of_mark(text: str, marks: Iterable[str]) -> int:
    """Return the start of an incomplete mark at the end of `text`; the text's length if none."""
    sizes = (
        size
        for mark in marks
        for size in range(1, min(len(mark), len(text) + 1))
        if text.endswith(mark[:size])
    )
    return len(text) - max(sizes, default=0)


class StopCheck(NamedTuple):
    """The text that became safe to show, and the stop string found in it."""

    text: str
    matched: str | None = None


class StopStringChecker:
    """Searches the text of one request for its stop strings.

    Text that could be the beginning of a stop string is held back until that is decided. The match
    that *ends* first wins (among these, the longest), so the answer does not depend on how the text
    was split. After a match nothing more may be fed. A match that ends in a piece fed without
    `may_stop` is ordinary text.
    """

    def __init__(
        self,
        stops: Sequence[str],
        *,
        keep_stop: bool = False,
        special: Mapping[str, int] = MappingProxyType({}),
        hidden: Set[int] = frozenset(),
    ) -> None:
        """Prepare the search.

        Args:
            stops: the stop strings, none of them empty.
            keep_stop: leave the stop string at the end of the text (`no_stop_trim`).
            special: text -> id of the special tokens.
            hidden: ids of hidden special tokens. The last token of an output may be hidden too.
        """
        self._keep_stop = keep_stop
        used = [text for text in special if any(text in stop for stop in stops)]
        self._halves = dict(zip(used, map(chr, _HALVES), strict=False))
        self._half_of = {special[text]: half for text, half in self._halves.items()}
        self._removed = str.maketrans(dict.fromkeys(self._halves.values()))
        shown = frozenset(text for text in used if special[text] not in hidden)
        # Searched text -> the stop string.
        self._stops = {self._searched(stop, shown): stop for stop in stops}
        self._stops |= {stop: stop for stop in stops}
        self._held = ""

    def hidden(self, token: int) -> str:
        """Return the text to feed for a hidden token."""
        return self._half_of.get(token, "")

    def feed(self, piece: str, *, may_stop: bool = True) -> StopCheck:
        """Add `piece` to the text. If `may_stop`, search for matches that end in it."""
        if not piece:
            return StopCheck("")
        text = self._held + piece
        found = self._first_match(text, len(self._held)) if may_stop else None
        if found is not None:
            start, searched = found
            self._held = ""
            shown = text[: start + len(searched)] if self._keep_stop else text[:start]
            return StopCheck(self._shown(shown), self._stops[searched])
        safe = begin_of_mark(text, self._stops)
        self._held = text[safe:]
        return StopCheck(self._shown(text[:safe]))

    def flush(self) -> str:
        """Return the held-back text after the last piece."""
        held, self._held = self._held, ""
        return self._shown(held)

    def _searched(self, stop: str, shown: Set[str]) -> str:
        """Return `stop` with tokens replaced by their characters, except for tokens in `shown`,
        which can be hidden only at the end."""
        texts = "|".join(map(re.escape, sorted(self._halves, key=len, reverse=True)))
        *parts, end = re.split(f"({texts})", stop) if texts else [stop]
        if not end and parts:
            *parts, end = parts
            end = self._halves[end]
        hidden = {text: half for text, half in self._halves.items() if text not in shown}
        return "".join(hidden.get(part, part) for part in parts) + end

    def _shown(self, text: str) -> str:
        return text.translate(self._removed) if self._removed else text

    def _first_match(self, text: str, after: int) -> tuple[int, str] | None:
        """Return start and stop string of the match that ends first after position `after`."""
        found = [
            (start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(after + 1 - len(stop), 0))) >= 0
        ]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)
