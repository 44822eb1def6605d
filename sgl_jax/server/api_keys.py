"""API keys: which key permits which routes, and the name of the caller that sent one.

Keys are kept as digests. A caller is known by its key's name, or number, never by the key.
"""

import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from starlette.types import Scope

from sgl_jax.core.calls import CALLS
from sgl_jax.core.server_args import ServerArgs

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
    """The sender of a request. Without keys every caller is `anonymous`, and an admin."""

    name: str
    is_admin: bool


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

    def __init__(self, clients: Mapping[str, str], admins: Mapping[str, str]) -> None:
        """
        Args:
            clients: name -> key of callers that may use the model.
            admins: name -> key of callers that may use every route.

        Raises:
            ValueError: a key is empty, a name too long or reserved, or either is the same as
                another one.
        """
        shared = sorted(set(clients) & set(admins))
        if shared:
            raise ValueError(f"an API key and an admin API key are both named {shared[0]!r}")
        callers = [(Caller(name, is_admin=False), key) for name, key in clients.items()]
        callers += [(Caller(name, is_admin=True), key) for name, key in admins.items()]
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
        clients = dict(_given("key", args.api_key, args.api_key_file))
        admins = dict(_given("admin", args.admin_api_key, args.admin_api_key_file))
        return cls(clients, admins)

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


def _given(prefix: str, key: str | None, path: str | None) -> Iterator[tuple[str, str]]:
    """Name and key of each. A file has `KEY` or `NAME KEY` a line; # begins a comment line."""
    if key is not None:
        yield prefix, key
    if path is None:
        return
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the API keys in {path}: {error}") from error
    names = set()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ValueError(f"{path}, line {number}: must be KEY or NAME KEY")
        name = words[0] if len(words) == 2 else f"{prefix}-{number}"
        if name in names or name == prefix:
            raise ValueError(f"{path}, line {number}: the name {name!r} is taken")
        names.add(name)
        yield name, words[-1]
    if not names:
        raise ValueError(f"{path} holds no API key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
