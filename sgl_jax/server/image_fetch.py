"""Fetches the images of URLs from the domains in `--allowed-media-domains`.

Follows no redirect, because it could lead to any address, and uses no proxy of the environment.
"""

import asyncio
import functools
import ssl
from collections.abc import Set
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import httptools

from sgl_jax.core.errors import InvalidRequestError

_PORTS = {"http": 80, "https": 443}
_READ_BYTES = 65_536
_SAFE = "/%:@!$&'()*+,;=?-._~"  # in a path or a query


class _Address(NamedTuple):
    scheme: str
    host: str
    port: int
    name: str  # as in the header `Host`, and in the list of domains
    target: str  # path and query


class _Body:
    """The callbacks of the parser."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_complete = False

    def on_body(self, data: bytes) -> None:
        self.data += data

    def on_message_complete(self) -> None:
        self.is_complete = True


async def fetch_image(url: str, domains: Set[str], max_bytes: int, timeout_s: float) -> bytes:
    """Return the file at `url`.

    Raises `InvalidRequestError` if its domain is not one of `domains`, or it cannot be fetched
    within the limits.
    """
    address = _address_of(url, domains)
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(address, max_bytes)
    except TimeoutError as error:
        reason = f"{address.name} took longer than {timeout_s:.0f} s"
        raise InvalidRequestError(reason) from error
    except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        reason = f"it cannot be fetched from {address.name}: {error}"
        raise InvalidRequestError(reason) from error


def _address_of(url: str, domains: Set[str]) -> _Address:
    try:
        parts = urlsplit(url.strip())
        scheme, host = parts.scheme, parts.hostname or ""
        port = parts.port or _PORTS[scheme]
    except (KeyError, ValueError) as error:
        raise InvalidRequestError("its URL cannot be read") from error
    name = host if port == _PORTS[scheme] else f"{host}:{port}"
    if name not in domains or "@" in parts.netloc:
        raise InvalidRequestError(
            "this server does not fetch from the domain of its URL: send a data URI, or start the "
            "server with --allowed-media-domains"
        )
    target = quote(parts.path or "/", safe=_SAFE)
    if parts.query:
        target += "?" + quote(parts.query, safe=_SAFE)
    return _Address(scheme, host, port, name, target)


async def _get(address: _Address, max_bytes: int) -> bytes:
    secure = _tls() if address.scheme == "https" else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=secure)
    body = _Body()
    parser = httptools.HttpResponseParser(body)
    try:
        head = f"GET {address.target} HTTP/1.1\r\nHost: {address.name}\r\n"
        writer.write(f"{head}Accept: image/*\r\nConnection: close\r\n\r\n".encode())
        while not body.is_complete:
            data = await reader.read(_READ_BYTES)
            if not data:
                break
            parser.feed_data(data)
            if len(body.data) > max_bytes:
                raise InvalidRequestError(f"its file exceeds the {max_bytes} bytes that are taken")
    finally:
        writer.close()
    status = parser.get_status_code()
    if status != 200:
        redirect = ": redirects are not followed" if 300 <= status < 400 else ""
        raise InvalidRequestError(f"{address.name} answered with status {status}{redirect}")
    return bytes(body.data)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
