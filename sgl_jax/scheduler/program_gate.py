"""Holds requests with a grammar until it is compiled, and until the programs of their steps are.

Only steps with a grammar need extra programs. Held requests stay out of the waiting queue, so they
block nothing, preempt nothing and are not passed over.
"""

from collections.abc import Iterator

from sgl_jax.scheduler.request import Request


class ProgramGate:
    """A gate for requests with a grammar. While it is open, as at first, each passes once compiled.

    Attributes:
        held: the held requests by rid, in the order of arrival.
        error: reason why requests with a grammar cannot be served; "" if they can.
    """

    def __init__(self) -> None:
        self._is_open = True
        self.held: dict[str, Request] = {}
        self._compiled: set[str] = set()  # rids of held requests with a compiled grammar
        self.error = ""

    def __iter__(self) -> Iterator[Request]:
        return iter(self.held.values())

    def __contains__(self, request: Request) -> bool:
        return request.rid in self.held

    @property
    def num_without_grammar(self) -> int:
        """Return the number of held requests with a grammar still being compiled."""
        return len(self.held) - len(self._compiled)

    def awaits_grammar(self, rid: str) -> Request | None:
        """Return the held request `rid` if its grammar is not compiled yet."""
        return None if rid in self._compiled else self.held.get(rid)

    def close(self) -> None:
        self._is_open = False

    def open(self, error: str) -> list[Request]:
        """Stop waiting for programs; return the requests that may pass, in order of arrival: with
        an `error`, all held requests."""
        self._is_open, self.error = True, error
        held = self.held.values()
        return [request for request in held if error or request.rid in self._compiled]

    def note_compiled(self, request: Request) -> bool:
        """Record that the grammar of a held request is compiled; return whether it may pass."""
        self._compiled.add(request.rid)
        return self._is_open

    def holds(self, request: Request) -> bool:
        """Hold `request` if it has a grammar; return whether it has."""
        if request.message.sampling.grammar is None:
            return False
        self.held[request.rid] = request
        return True

    def remove(self, request: Request) -> None:
        del self.held[request.rid]
        self._compiled.discard(request.rid)
