"""Finds stop strings in text that arrives piece by piece."""

from collections.abc import Sequence
from typing import NamedTuple


def begin_of_mark(text: str, marks: Sequence[str]) -> int:
    """The place in `text` from which its end may be an incomplete mark; its length if none."""
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
    """Watches the text of one request for its stop strings.

    Text that could be the beginning of a stop string is held back until it turns out to be one
    or not. The match that *ends* first wins (of those the longest), so the answer does not
    depend on how the text was cut into pieces. After a match nothing more may be fed. A match that
    ends in a piece fed without `may_stop` is ordinary text.
    """

    def __init__(self, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        """
        Args:
            stops: the stop strings, none of them empty.
            keep_stop: leave the stop string at the end of the text (`no_stop_trim`).
        """
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._held = ""

    def feed(self, piece: str, *, may_stop: bool = True) -> StopCheck:
        """Add `piece` of the text; look for matches that end in it if `may_stop`."""
        if not piece:
            return StopCheck("")
        text = self._held + piece
        found = self._first_match(text, len(self._held)) if may_stop else None
        if found is not None:
            start, stop = found
            self._held = ""
            return StopCheck(text[: start + len(stop)] if self._keep_stop else text[:start], stop)
        safe = begin_of_mark(text, self._stops)
        self._held = text[safe:]
        return StopCheck(text[:safe])

    def flush(self) -> str:
        """The text held back, once none follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, after: int) -> tuple[int, str] | None:
        """Return start and stop string of the match that ends first beyond `after`."""
        found = [
            (start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(after + 1 - len(stop), 0))) >= 0
        ]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)
