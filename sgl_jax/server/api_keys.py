"""API keys: which key permits which routes, and the name of the caller that sent one.

Keys are kept as digests. A caller is known by its key's name, or number, never by the key.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import Request
from starlette.types import Scope

from sgl_jax.core.calls import CALLS
from sgl_jax.core.messages import Tenant
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.server.key_file import read_key_file

# What an operator does, and what tells of all clients at once.
ADMIN_PATHS = frozenset(
    {
        "/get_server_info",
        "/server_info",
        *(call.route for call in CALLS if call.is_admin and call.route),
    }
)
MAX_NAME_CHARS = 64  # as part of the engine's ids of its sessions, each may take 12 characters
_STATE = "caller"


@dataclass(frozen=True)
class Caller:
    """The sender of a request. Without keys every caller is `anonymous`, and an admin.

    `tenant` belongs to a key of a file; None for a key that a flag gives to all clients.
    """

    name: str
    is_admin: bool
    tenant: Tenant | None = None


ANONYMOUS = Caller("anonymous", is_admin=True)


def caller_of(request: Request) -> Caller:
    """The caller that sent `request`."""
    caller = request.scope.get("state", {}).get(_STATE, ANONYMOUS)
    assert isinstance(caller, Caller)
    return caller


def note_caller(scope: Scope, caller: Caller) -> None:
    """Let `caller_of` find it."""
    scope.setdefault("state", {})[_STATE] = caller


class ApiKeys:
    """The keys of a server."""

    def __init__(
        self,
        clients: Mapping[str, str],
        admins: Mapping[str, str],
        tenants: Mapping[str, Tenant] | None = None,
    ) -> None:
        """
        Args:
            clients: name -> key of callers that may use the model.
            admins: name -> key of callers that may use every route.
            tenants: name -> tenant of the keys that have one.

        Raises:
            ValueError: a key is empty, a name too long or reserved, or either is the same as
                another one.
        """
        shared = sorted(set(clients) & set(admins))
        if shared:
            raise ValueError(f"an API key and an admin API key are both named {shared[0]!r}")
        callers = [
            (Caller(name, is_admin, (tenants or {}).get(name)), key)
            for is_admin, keys in ((False, clients), (True, admins))
            for name, key in keys.items()
        ]
        self._digests: list[tuple[bytes, Caller]] = []
        for caller, key in callers:
            if not key.strip():
                raise ValueError(f"the API key {caller.name!r} is empty")
            if caller.name == ANONYMOUS.name:
                raise ValueError(f"{caller.name!r} is the name of callers without a key")
            if len(caller.name) > MAX_NAME_CHARS:
                raise ValueError(
                    f"the name of an API key must have at most {MAX_NAME_CHARS} characters, "
                    f"one has {len(caller.name)}"
                )
            digest = _digest(key.encode())
            if any(digest == other for other, _ in self._digests):
                raise ValueError(f"the API key {caller.name!r} is the same as another one")
            self._digests.append((digest, caller))
        self._has_admins = bool(admins)
        self._has_clients = bool(clients)

    @classmethod
    def from_args(cls, args: ServerArgs) -> "ApiKeys":
        """The keys that settings name. Raises `ValueError`, as `__init__` and for bad files."""
        clients = {} if args.api_key is None else {"key": args.api_key}
        admins = {} if args.admin_api_key is None else {"admin": args.admin_api_key}
        tenants: dict[str, Tenant] = {}
        for keys, path, prefix in (
            (clients, args.api_key_file, "key"),
            (admins, args.admin_api_key_file, "admin"),
        ):
            for key, tenant in () if path is None else read_key_file(path, prefix):
                keys[tenant.name] = key
                tenants[tenant.name] = tenant
        return cls(clients, admins, tenants)

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for at all."""
        return not self._digests

    def admit(self, path: str, authorization: Sequence[bytes]) -> Caller | None:
        """The caller with these `Authorization` headers; None if it may not use route `path`.

        Takes the same time whichever key is wrong, and in whichever place.
        """
        caller = self._find(authorization)
        if path in ADMIN_PATHS and self._has_admins:
            return caller if caller is not None and caller.is_admin else None
        if caller is None and not self._has_clients:
            return ANONYMOUS if self.is_open else Caller("anonymous", is_admin=False)
        return caller

    def _find(self, authorization: Sequence[bytes]) -> Caller | None:
        if len(authorization) != 1:
            return None
        scheme, _, token = authorization[0].partition(b" ")
        given = _digest(token.strip())
        found = None
        for digest, caller in self._digests:
            if hmac.compare_digest(given, digest):
                found = caller
        return found if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
