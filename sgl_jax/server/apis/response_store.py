"""The responses that a server keeps in memory."""

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from sgl_jax.server.errors import ApiError


class StoredResponse(NamedTuple):
    """A response and its conversation, as JSON."""

    owner: str  # name of the caller that may read it
    response: bytes
    input_items: bytes  # a list
    messages: bytes  # of the conversation with the answer, without instructions: a list

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items) + len(self.messages)

    def items_by_id(self) -> dict[str, Any]:
        """The items of the input and the output."""
        output = msgspec.json.decode(self.response)["output"]
        return {item["id"]: item for item in (*msgspec.json.decode(self.input_items), *output)}


class ResponseStore:
    """The latest responses: the oldest go when there are too many, or they take too much."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response; one that is larger than the store is not kept."""
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_count or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """The caller's response of this id. Raises `ApiError` 404, which names `param`."""
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
        self.get(response_id, owner)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id).num_bytes
