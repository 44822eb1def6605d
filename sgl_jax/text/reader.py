"""The parts of a model's answer, and their incremental reading: a format is a generator, and its
input arrives in pieces.

A format's generator reads from an `Unread` and yields events, or None to wait for more text. So it
is written as if all text were present, and its events do not depend on how the text was split. Text
that does not match the format is content: nothing is lost.
"""

import json
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from sgl_jax.text.stop_strings import begin_of_mark


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Reasoning that the model wrote before its answer."""

    text: str


class CallBegun(NamedTuple):
    """A call of a tool; its arguments follow. `id` is None unless the format has ids."""

    name: str
    id: str | None = None


class Arguments(NamedTuple):
    """The next piece of the JSON text of the open call's arguments."""

    text: str


class CallEnded(NamedTuple):
    """The arguments are complete. Missing if the answer ends within a call."""


Event = Content | Reasoning | CallBegun | Arguments | CallEnded


def as_json(value: object) -> str:
    """Return `value` as JSON text. Raises ValueError or TypeError if JSON has no such value.

    Unpaired surrogates, which escapes can write but UTF-8 cannot, are an error too.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


T = TypeVar("T")
Reading = Generator[Event | None, None, T]


class Unread:
    """Text that has arrived but was not read by the format."""

    def __init__(self) -> None:
        self.held = ""
        self.has_ended = False  # nothing more arrives

    def take(self, num_chars: int) -> str:
        taken, self.held = self.held[:num_chars], self.held[num_chars:]
        return taken

    def pass_on(self, kind: Callable[[str], Event], marks: Sequence[str]) -> Reading[str]:
        """Yield text as events of `kind` up to the first of `marks`.

        Returns that mark with the spaces before it, which are read but not yielded; "" at the end
        of the text. No mark may be a prefix of another.
        """
        while True:
            places = [(at, mark) for mark in marks if (at := self.held.find(mark)) >= 0]
            if places:
                at, mark = min(places)
                num_shown = len(self.held[:at].rstrip())
            elif self.has_ended or not marks:
                num_shown = len(self.held)
            else:
                num_shown = len(self.held[: begin_of_mark(self.held, marks)].rstrip())
            if num_shown:
                shown, self.held = self.held[:num_shown], self.held[num_shown:]
                yield kind(shown)
            if places:
                return self.take(at - num_shown + len(mark))
            if self.has_ended:
                return ""
            yield None

    def find(self, *marks: str) -> Reading[int]:
        """Return the number of characters before the first of `marks`, or -1. Reads nothing."""
        searched = 0
        while True:
            found = [at for mark in marks if (at := self.held.find(mark, searched)) >= 0]
            if found:
                return min(found)
            if self.has_ended:
                return -1
            searched = max(0, len(self.held) - max(map(len, marks)))
            yield None

    def skip_space(self) -> Reading[None]:
        while True:
            self.held = self.held.lstrip()
            if self.held or self.has_ended:
                return
            yield None

    def begins_with(self, mark: str) -> Reading[bool]:
        """Return whether `mark` comes next. Reads nothing."""
        while len(self.held) < len(mark) and mark.startswith(self.held) and not self.has_ended:
            yield None
        return self.held.startswith(mark)

    def comes(self, mark: str) -> Reading[bool]:
        """Return whether `mark` comes next, perhaps after spaces. Reads nothing."""
        while True:
            text = self.held.lstrip()
            if text.startswith(mark) or self.has_ended or not mark.startswith(text):
                return text.startswith(mark)
            yield None

    def skip(self, mark: str) -> Reading[bool]:
        """Read `mark` and the spaces before it if it comes next. Return whether it did."""
        is_there = yield from self.comes(mark)
        if is_there:
            self.held = self.held.lstrip()[len(mark) :]
        return is_there

    def close(self, mark: str) -> Reading[bool]:
        """Skip the end `mark` of a call. If the text ends within `mark`, read its beginning."""
        is_there = yield from self.skip(mark)
        if not is_there and self.has_ended and mark.startswith(self.held.lstrip()):
            self.held = ""
        return is_there


Format = Callable[[Unread], Reading[None]]


class AnswerReader:
    """Turns one answer into events as its text arrives."""

    def __init__(self, read: Format) -> None:
        self._unread = Unread()
        self._next_event = partial(next, read(self._unread), None)

    def feed(self, piece: str, *, is_last: bool = False) -> list[Event]:
        """Return the events that `piece` makes certain: all remaining events if `is_last`. Adjacent
        texts of one kind may be several events."""
        self._unread.held += piece
        self._unread.has_ended = is_last
        return list(iter(self._next_event, None))
