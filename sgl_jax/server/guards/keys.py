"""API keys: the routes that a key permits, and the caller, tenant and sessions of a key.

Keys are kept as digests. Code sees a caller by its key's name, or number, never by the key.
"""

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import Request
from msgspec.structs import replace
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_jax.core.messages import CALL_OF, SessionTurn
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.shares import USER_PREFIX, Tenant
from sgl_jax.server.errors import ApiError, error_response, is_of_messages
from sgl_jax.server.references import references_of

# Routes that show the requests, sessions and prefixes of all clients.
_VIEW_PATHS = frozenset({"/memory/hello", "/memory/events", "/memory/find", "/memory/page"})
# Routes of trainers that no record of a call has (`admin.weight_routes`).
UPDATE_PATHS = "/begin_weight_update", "/end_weight_update"
WEIGHT_PATHS = (
    "/update_weights_from_tensor",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
)
# Routes of operators, and the routes above.
ADMIN_PATHS = frozenset(
    {
        "/get_server_info",
        "/server_info",
        *_VIEW_PATHS,
        *WEIGHT_PATHS,
        *UPDATE_PATHS,
        *(call.route for call in CALL_OF.values() if call.is_admin and call.route),
    }
)
MAX_NAME_CHARS = 64  # in the engine's session ids, each may become 12 characters


@dataclass(frozen=True)
class Caller:
    """The sender of a request. Without keys, every caller is `anonymous` and an admin.

    `tenant` belongs to a key of a file; it is None for a key that a flag gives to all clients. A
    key is unnamed if its name is its line number.
    """

    name: str
    is_admin: bool
    tenant: Tenant | None = None
    is_unnamed: bool = False


ANONYMOUS = Caller("anonymous", is_admin=True)
_STRANGER = Caller(ANONYMOUS.name, is_admin=False)  # without a key, on a server with keys


def caller_of(request: Request) -> Caller:
    caller: Caller = getattr(request.state, "caller", ANONYMOUS)
    return caller


class ApiKeys:
    def __init__(self, callers: Iterable[tuple[Caller, str]]) -> None:
        """Index `callers`, pairs of a caller and its key. Raises `ValueError` if a name is too
        long, reserved or given to both an admin and a client, or if two keys are equal."""
        self._callers: dict[bytes, Caller] = {}  # by digest of the key
        are_admins: dict[str, bool] = {}
        for caller, key in callers:
            name = caller.name
            if name == ANONYMOUS.name:
                raise ValueError(f"{name!r} is the name of callers without a key")
            if len(name) > MAX_NAME_CHARS:
                raise ValueError(
                    f"the name of an API key must have at most {MAX_NAME_CHARS} characters, "
                    f"one has {len(name)}"
                )
            if are_admins.setdefault(name, caller.is_admin) != caller.is_admin:
                raise ValueError(f"an API key and an admin API key are both named {name!r}")
            digest = _digest(key.encode())
            if digest in self._callers:
                raise ValueError(f"the API key {name!r} is the same as another one")
            self._callers[digest] = caller
        self._has_admins = True in are_admins.values()
        self._has_tenants = any(caller.tenant for caller in self._callers.values())
        self._has_clients = False in are_admins.values()

    @classmethod
    def from_args(cls, args: ServerArgs) -> "ApiKeys":
        """Read the keys in the settings. Raises `ValueError` for invalid keys and bad files."""
        clients = _callers("key", args.api_key, args.api_key_file, is_admin=False)
        admins = _callers("admin", args.admin_api_key, args.admin_api_key_file, is_admin=True)
        callers = [*clients, *admins]
        unnamed = [caller.name for caller, _ in callers if caller.is_unnamed]
        if args.isolate_tenants and unnamed:
            raise ValueError(
                "--isolate-tenants needs a name for each key of a file, since numbers of lines "
                f"change: {', '.join(unnamed)} has none"
            )
        return cls(callers)

    @property
    def is_open(self) -> bool:
        return not self._callers

    def admit(self, path: str, authorization: Sequence[bytes]) -> Caller | None:
        """Return the caller with these `Authorization` headers; None if it may not use `path`.

        Only digests are compared, so that timing reveals nothing about a key.
        """
        caller = None
        if len(set(authorization)) == 1:  # sglang-router adds its header to the client's
            scheme, _, token = authorization[0].partition(b" ")
            if scheme.lower() == b"bearer":
                caller = self._callers.get(_digest(token.strip()))
        is_admins = path in ADMIN_PATHS and self._has_admins
        if is_admins or (path in _VIEW_PATHS and self._has_tenants):
            return caller if caller is not None and caller.is_admin else None
        if caller is None and not self._has_clients:
            return ANONYMOUS if self.is_open else _STRANGER
        return caller


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _callers(
    prefix: str, key: str | None, path: str | None, *, is_admin: bool
) -> Iterator[tuple[Caller, str]]:
    if key is not None:
        yield Caller(prefix, is_admin), key
    for own_key, tenant, is_unnamed in () if path is None else _read_key_file(path, prefix):
        yield Caller(tenant.name, is_admin, tenant, is_unnamed), own_key


# Format of a line in a key file.
_FORMAT = "must be KEY, or NAME KEY [weight=W] [max_queued=N] [max_running=N]"
_MOST = {"weight": 1e6, "max_queued": 1e7, "max_running": 1e7}
_OPTION = re.compile(f"({'|'.join(_MOST)})=(.*)")


def _read_key_file(path: str, prefix: str) -> Iterator[tuple[str, Tenant, bool]]:
    """Yield key, tenant and whether the name is missing, for each non-comment line of `path`.

    A missing name becomes `prefix` and the line number. Raises `ValueError`, naming the line, for a
    bad file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the API keys in {path}: {error}") from error
    names = {prefix}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key, tenant = _read_line(words, f"{prefix}-{number}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if tenant.name in names:
            raise ValueError(f"{path}, line {number}: the name {tenant.name!r} is taken")
        names.add(tenant.name)
        yield key, tenant, len(words) == 1
    if len(names) == 1:
        raise ValueError(f"{path} holds no API key")


def _read_line(words: Sequence[str], default_name: str) -> tuple[str, Tenant]:
    if len(words) == 1:
        return words[0], Tenant(name=default_name)
    name, key, *options = words
    if _OPTION.fullmatch(key):  # otherwise the first word, a key, would be shown as a name
        raise ValueError(f"a key with options needs a name: {_FORMAT}")
    limits: dict[str, Any] = {}
    for option in options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise ValueError(_FORMAT)
        field, text = match.groups()
        if field in limits:
            raise ValueError(f"{field} stands there twice")
        limits[field] = _number(field, text)
    return key, Tenant(name=name, **limits)


def _number(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST[field]:  # also False for NaN
        raise ValueError(f"{field} must be a number from 0 to {_MOST[field]:g}, got {text!r}")
    if field == "weight" and value == 0:
        raise ValueError("weight must be above 0")
    if field != "weight" and not value.is_integer():
        raise ValueError(f"{field} must be a whole number, got {text!r}")
    return value if field == "weight" else int(value)


def tenant_of(request: Request, user: str | None) -> Tenant | None:
    """Return the tenant of `request` with this `user` in its body."""
    tenant = caller_of(request).tenant
    if tenant is None and user:
        is_pooled = references_of(request).args.has_key_file
        return Tenant(name=USER_PREFIX + user, is_pooled=is_pooled)
    return tenant


def visible_tenant(request: Request) -> str | None:
    """Return the only tenant with visible figures ("": requests without one); None: all of them."""
    caller, args = caller_of(request), references_of(request).args
    is_only_key = not (args.has_key_file or args.admin_api_key)
    if caller.is_admin or (is_only_key and caller != _STRANGER):
        return None
    return "" if caller.tenant is None else caller.tenant.name


class SessionOwner:
    """The sessions of one caller and tenant, or all sessions for an admin without a tenant.

    With `isolates`, every tenant has separate namespaces.
    """

    def __init__(
        self, caller: Caller, tenant: Tenant | None = None, *, isolates: bool = False
    ) -> None:
        self.tenant = tenant
        self._isolates = isolates
        names = [] if caller.is_admin else [caller.name]
        if tenant is not None and tenant.name.startswith(USER_PREFIX):
            names.append(tenant.name)
        self._prefix = "".join(f"{quote(name, safe='')}:" for name in names)

    def engine_id(self, session_id: str) -> str:
        return self._prefix + session_id

    def client_id(self, engine_id: str) -> str | None:
        """Return the caller's id of a session; None if it belongs to another caller."""
        return engine_id[len(self._prefix) :] if engine_id.startswith(self._prefix) else None

    def own(self, turn: SessionTurn | None) -> SessionTurn | None:
        return turn if turn is None else replace(turn, id=self.engine_id(turn.id))

    def namespace(self, salt: str) -> str:
        """Return the engine's namespace for the caller's `salt`, unique for each tenant and salt.

        A quoted name has no colon, so pairs cannot collide.
        """
        if not self._isolates:
            return salt
        name = "" if self.tenant is None else quote(self.tenant.name, safe="")
        return f"{name}:{salt}"

    def for_client(self, message: str) -> str:
        """Return a message of the engine, with the caller's id of the session."""
        return message.replace(f"'{self._prefix}", "'") if self._prefix else message


def owner_of(request: Request, tenant: Tenant | None) -> SessionOwner:
    isolates = references_of(request).args.isolate_tenants
    return SessionOwner(caller_of(request), tenant, isolates=isolates)


OPEN_PATHS = frozenset({"/health", "/liveness", "/ping"})  # load balancers have no key


class ApiKeyMiddleware:
    """Refuses callers not admitted by `keys`, before the body is read.

    Routes of load balancers and paths in `public` need no key. With `open_metrics`,
    neither does `/metrics`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        public: Collection[str] = (),
        *,
        open_metrics: bool = False,
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = OPEN_PATHS.union(public)
        self._open_metrics = open_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            given = _authorization(scope)
            caller = self._keys.admit(scope["path"], given)
            if caller is None and self._open_metrics and scope["path"] == "/metrics":
                caller = _STRANGER
            if caller is None:
                whose = "an admin API key" if scope["path"] in ADMIN_PATHS else "an API key"
                or_header = ", or x-api-key the key," if is_of_messages(scope["path"]) else ""
                refusal = ApiError(
                    401,
                    f"the Authorization header must be 'Bearer ' and {whose}{or_header} of this "
                    "server",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error_response(refusal, scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> list[bytes]:
    """Return values of the `Authorization` header, or of Anthropic's `x-api-key` in its place."""
    headers = scope["headers"]
    given = [value for name, value in headers if name == b"authorization"]
    if given or not is_of_messages(scope["path"]):
        return given
    return [b"Bearer " + value for name, value in headers if name == b"x-api-key"]
