"""Refuses requests from web pages of other sites to a server that needs no key.

A browser sends the requests of any page to any address that its machine can reach, including
loopback. Two checks keep such pages out of every route except probes and this server's pages:

- Host: a page can point its domain name at this server's address (DNS rebinding), which makes it
  the same origin. An address in place of a name cannot be rebound.
- Origin and Sec-Fetch-Site, which browsers set and pages cannot change.

Programs send neither header. A request with a key is not checked: no page of another site has it.
"""

import ipaddress
import logging
import re
import socket
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_jax.core.messages import CALL_OF
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.server.errors import ApiError, error_response
from sgl_jax.server.guards.keys import ANONYMOUS, OPEN_PATHS, ApiKeys

logger = logging.getLogger(__name__)
_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?", re.IGNORECASE)
# Routes that change state on a GET, for older SGLang clients.
_CHANGING_GETS = {
    call.route for call in CALL_OF.values() if call.is_admin and "GET" in call.methods
}
# Names absent from public DNS, so that only the local network can assign them an address.
_LOCAL_ENDINGS = (".local", ".internal", ".svc")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `--host`."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def warn_if_exposed(args: ServerArgs, keys: ApiKeys) -> None:
    if keys.is_open and not is_loopback(args.host):
        logger.warning(
            "NO API KEY: every machine that can reach %s:%d can use the model, read all sessions, "
            "and pause or reconfigure this server. Set --api-key-file and "
            "--admin-api-key-file, or listen only on this machine with --host 127.0.0.1",
            args.host,
            args.port,
        )


def allowed_origins(args: ServerArgs) -> list[str]:
    return _entries(args.cors_allow_origins)


def _entries(text: str | None) -> list[str]:
    return [each.strip() for each in (text or "").split(",") if each.strip()]


class OriginMiddleware:
    """Answers 403 to other sites' pages without a key, except on `public` paths (without data)."""

    def __init__(self, app: ASGIApp, args: ServerArgs, public: Collection[str] = ()) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS.union(public)
        self._origins = frozenset(allowed_origins(args))
        self._allowed = [each.lower() for each in _entries(args.allowed_hosts)]
        self._names = {"localhost", args.host.lower(), *self._allowed}
        self._is_loopback = is_loopback(args.host)
        if not self._is_loopback:
            self._names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            caller = scope.get("state", {}).get("caller", ANONYMOUS)
            reason = self._refusal(scope) if caller.name == ANONYMOUS.name else None
            if reason is not None:
                refusal = ApiError(403, reason, code="origin_refused")
                await error_response(refusal, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if not all(self._has_host(host) for host in hosts):
            return (
                "the Host header must be an IP address, localhost, or a name in --allowed-hosts: "
                "without a key, other names are refused"
            )
        origins, site = headers.getlist("origin"), headers.get("sec-fetch-site")
        if scope["path"] in _CHANGING_GETS and scope["method"] != "POST":
            if site != "same-origin" and _is_of_browser(headers):
                return "a browser must send a POST here"
            return None
        if origins and ("*" in self._origins or self._origins.issuperset(origins)):
            return None
        if site == "same-origin":
            return None
        is_own = all(any(_is_same(origin, host) for host in hosts) for origin in origins)
        if site not in (None, "none") or not is_own:
            return (
                "without a key, pages of other origins are refused: name the origin in "
                "--cors-allow-origins to serve them"
            )
        return None

    def _has_host(self, authority: str) -> bool:
        """Return whether no page of another site can have this `Host`."""
        if "*" in self._allowed:
            return True
        match = _AUTHORITY.fullmatch(authority)
        if match is None:
            return False
        name = (match[1] or match[2]).lower().removesuffix(".")
        if name in self._names or name.endswith(".localhost") or _address(name) is not None:
            return True
        if any(each.startswith("*.") and name.endswith(each[1:]) for each in self._allowed):
            return True
        return not self._is_loopback and ("." not in name or name.endswith(_LOCAL_ENDINGS))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_same(origin: str, host: str) -> bool:
    """Return whether `origin` and `host` are equal; both may leave out the default port."""
    scheme, _, authority = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(port) and authority.removesuffix(port) == host.lower().removesuffix(port)


def _is_of_browser(headers: Headers) -> bool:
    """Return whether a browser sent this. It sends no `Sec-Fetch-*` to a network address without
    TLS, and no `Origin` with a GET of an image: then only the browser's name remains."""
    return (
        "origin" in headers
        or any(name.startswith("sec-fetch-") for name in headers)
        or headers.get("user-agent", "").startswith("Mozilla/")
    )
