"""The responses that a server keeps in memory."""

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from sgl_jax.server.errors import ApiError


class StoredResponse(NamedTuple):
    """A response and its conversation, as JSON."""

    owner: str  # caller with read access
    response: bytes
    input_items: bytes  # a list
    messages: bytes  # a list: the conversation with the answer, without instructions
    tenant: str = ""  # charged for it; "": the owner

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items) + len(self.messages)

    def items_by_id(self) -> dict[str, Any]:
        output = msgspec.json.decode(self.response)["output"]
        return {item["id"]: item for item in (*msgspec.json.decode(self.input_items), *output)}


class _Held:
    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0


class ResponseStore:
    """The latest responses. Above a limit, the tenant with the most responses (or bytes) loses its
    oldest response, so no tenant displaces a response of a tenant that has fewer."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._held: dict[str, _Held] = {}  # by tenant; never empty
        self._tenants: dict[str, str] = {}  # by response id
        self._num_bytes = 0

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, unless it is larger than the store."""
        tenant = self._tenants[response_id] = stored.tenant or stored.owner
        held = self._held.setdefault(tenant, _Held())
        held.responses[response_id] = stored
        held.num_bytes += stored.num_bytes
        self._num_bytes += stored.num_bytes
        while len(self._tenants) > self._max_count:
            self._drop_oldest_of(max(self._held.values(), key=lambda each: len(each.responses)))
        while self._num_bytes > self._max_bytes:
            self._drop_oldest_of(max(self._held.values(), key=lambda each: each.num_bytes))

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Return the caller's response of this id. Raises `ApiError` 404, with field `param`."""
        tenant = self._tenants.get(response_id)
        stored = None if tenant is None else self._held[tenant].responses[response_id]
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

    def _drop_oldest_of(self, held: _Held) -> None:
        self._drop(next(iter(held.responses)))

    def _drop(self, response_id: str) -> None:
        tenant = self._tenants.pop(response_id)
        held = self._held[tenant]
        num_bytes = held.responses.pop(response_id).num_bytes
        held.num_bytes -= num_bytes
        self._num_bytes -= num_bytes
        if not held.responses:
            del self._held[tenant]
