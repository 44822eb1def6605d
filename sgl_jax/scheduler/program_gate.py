"""Holds requests with a grammar until it is compiled, and until the programs of their steps are.

Only steps with a grammar, or with a hidden state to return, need extra programs. Held requests stay
out of the waiting queue, so they block nothing, preempt nothing and are not passed over.
"""

from collections.abc import Iterator

from sgl_jax.core.messages import GenerateRequest
from sgl_jax.scheduler.request import Request


class ProgramGate:
    """A gate for requests whose steps need extra programs.

    While it is open, as at first, a request with a grammar passes once that is compiled, and any
    other at once.

    Attributes:
        held: the held requests by rid, in the order of arrival.
        error: reason why such requests cannot be served; "" if they can.
    """

    def __init__(self) -> None:
        self._is_open = True
        self.held: dict[str, Request] = {}
        self._compiled: set[str] = set()  # rids of held requests that wait only for programs
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

    def refuses(self, message: GenerateRequest) -> bool:
        """Return whether the request needs programs that failed to compile."""
        return bool(self.error) and (message.sampling.grammar is not None or message.return_hidden)

    def holds(self, request: Request) -> bool:
        """Hold `request` if it has to wait here; return whether it has."""
        if request.message.sampling.grammar is None:
            if self._is_open or not request.message.return_hidden:
                return False
            self._compiled.add(request.rid)
        self.held[request.rid] = request
        return True

    def remove(self, request: Request) -> None:
        del self.held[request.rid]
        self._compiled.discard(request.rid)
