"""A server's listening socket, its HTTP server, and notifications to the service manager."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import ASGIApp

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.server.guards.connection import guarded_protocol
from sgl_jax.server.guards.limits import Limits

logger = logging.getLogger(__name__)
_LAST_BYTES_TIMEOUT_S = 5  # for answers being written when the server stops
_START_POLL_S = 0.01
_FILES_BESIDE_CONNECTIONS = 256  # files and sockets other than connections
_BACKLOG = 2048  # connections queued in the kernel until accepted


def _allow_files(num_files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < num_files:
        logger.warning(
            "the system allows %d open files, --max-connections needs %d (ulimit -n)",
            most,
            num_files,
        )


@contextlib.asynccontextmanager
async def http_on(
    app: ASGIApp, limits: Limits, listener: socket.socket
) -> "AsyncIterator[asyncio.Future[None]]":
    """Serve HTTP on `listener`, entered once clients can connect. The future ends with uvicorn.

    Limits of connections already apply while the engine starts.
    """
    _allow_files(limits.max_connections + _FILES_BESIDE_CONNECTIONS)
    config = uvicorn.Config(
        app,
        http=guarded_protocol(limits),
        ws="none",
        log_config=None,
        log_level="error",  # its warnings are about client errors
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_LAST_BYTES_TIMEOUT_S,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]  # the caller's
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(_START_POLL_S)
        yield serving
    finally:
        server.should_exit = True
        await serving


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listening_socket(args: ServerArgs) -> socket.socket:
    """Take the port before the engine starts, so that a taken port is found before minutes of
    warm-up. Two sockets may be bound to one port, but only one can listen. Raises OSError."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((args.host, args.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {args.host}:{args.port}: {error.strerror}") from error
    return listener


def notify_systemd(state: str) -> None:
    """Report `state` to the service manager if it expects that (`Type=notify`, sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        try:
            notified.connect("\0" + address[1:] if address.startswith("@") else address)
            notified.sendall(state.encode())
        except OSError as error:
            logger.warning("the service manager was not notified of %s: %s", state, error)
