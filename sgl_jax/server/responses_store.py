"""Answers of `/v1/responses` that are kept for later requests, in memory and within bounds."""

from collections import OrderedDict
from typing import NamedTuple

from sgl_jax.server.errors import ApiError


class StoredResponse(NamedTuple):
    """A response and its conversation, as JSON."""

    owner: str  # name of the caller that may ask for it
    response: bytes
    input_items: bytes  # a list
    messages: bytes  # of the conversation with the answer, without instructions: a list

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return len(self.response) + len(self.input_items) + len(self.messages)


class ResponseStore:
    """The latest responses: the oldest go when there are too many, or they take too much."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response; one that is larger than the store is not kept."""
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_count or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """That of this id, if it is `owner`'s. Raises `ApiError` 404, which names `param`."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                "there is no such response: it was not stored, was deleted, or is too old",
                param=param,
                code="response_not_found",
            )
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        """Forget one. Raises as `get`."""
        self.get(response_id, owner)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id).num_bytes
