"""Holds requests back until the programs of their steps are compiled.

Only steps with a grammar need programs of their own. Held requests stay out of the waiting queue,
so they block nothing, preempt nothing and are not passed over.
"""

from collections.abc import Iterator

from sgl_jax.scheduler.request import Request


class ProgramGate:
    """Open at first.

    Attributes:
        error: why requests with a grammar cannot be served, "" if they can.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._held: dict[str, Request] = {}  # by rid, in the order of arrival
        self.error = ""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._held.values())

    def __contains__(self, request: Request) -> bool:
        return request.rid in self._held

    def close(self) -> None:
        self._is_open = False

    def open(self, error: str) -> list[Request]:
        """Stop holding requests; return the held ones in the order of arrival."""
        self._is_open, self.error = True, error
        return list(self._held.values())

    def holds(self, request: Request) -> bool:
        """Hold `request` if it must wait; return whether it must."""
        if self._is_open or request.message.sampling.grammar is None:
            return False
        self._held[request.rid] = request
        return True

    def remove(self, request: Request) -> None:
        del self._held[request.rid]
