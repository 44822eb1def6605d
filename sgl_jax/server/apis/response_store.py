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


class _Held:
    """The responses of one owner, the oldest first."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0


class ResponseStore:
    """The latest responses. When there are too many, or they take too much, the oldest one goes of
    the owner that has most of them, or whose take most. So no owner displaces another's response
    while it has more."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._held: dict[str, _Held] = {}  # by owner, none without a response
        self._owners: dict[str, str] = {}  # of each response
        self._num_bytes = 0

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response; one that is larger than the store is not kept."""
        self._owners[response_id] = stored.owner
        held = self._held.setdefault(stored.owner, _Held())
        held.responses[response_id] = stored
        held.num_bytes += stored.num_bytes
        self._num_bytes += stored.num_bytes
        while len(self._owners) > self._max_count:
            self._drop_oldest_of(max(self._held.values(), key=lambda each: len(each.responses)))
        while self._num_bytes > self._max_bytes:
            self._drop_oldest_of(max(self._held.values(), key=lambda each: each.num_bytes))

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """The caller's response of this id. Raises `ApiError` 404, which names `param`."""
        if self._owners.get(response_id) != owner:
            raise ApiError(
                404,
                "there is no such response: it was not stored, was deleted, or is too old",
                param=param,
                code="response_not_found",
            )
        return self._held[owner].responses[response_id]

    def delete(self, response_id: str, owner: str) -> None:
        self.get(response_id, owner)
        self._drop(response_id)

    def _drop_oldest_of(self, held: _Held) -> None:
        self._drop(next(iter(held.responses)))

    def _drop(self, response_id: str) -> None:
        owner = self._owners.pop(response_id)
        held = self._held[owner]
        num_bytes = held.responses.pop(response_id).num_bytes
        held.num_bytes -= num_bytes
        self._num_bytes -= num_bytes
        if not held.responses:
            del self._held[owner]
