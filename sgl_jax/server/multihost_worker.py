"""The server process of every host except host 0, from start to end.

It serves `/health` and `/metrics` of its host, and takes no other requests. After a signal, it
makes host 0 finish all requests and end the engine. Otherwise it ends when its engine process does,
with the codes in core/errors.py. Must never import jax.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sgl_jax.core.engine_messages import (
    EngineFailed,
    EngineInfo,
    EngineMessage,
    Heartbeat,
    HostReport,
)
from sgl_jax.core.errors import FAILED, GROUP_CODES, HOST_LOST, EngineDeadError, ShuttingDownError
from sgl_jax.core.messages import Shutdown
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import ChannelError, EngineClient
from sgl_jax.engine.front.health import EngineHealth
from sgl_jax.engine.process import ENGINE_COMMAND, EngineProcess, ExitReport
from sgl_jax.metrics.engine_metrics import HostMetrics
from sgl_jax.server.admin.management import health_answer, starting_error
from sgl_jax.server.errors import ApiError, error_response
from sgl_jax.server.guards.limits import Limits
from sgl_jax.server.lifecycle import end_on_signals, until_silent
from sgl_jax.server.listening import http_on, listening_socket, notify_systemd, url_of

logger = logging.getLogger(__name__)

_ENGINE_STOP_TIMEOUT_S = 15.0  # after the time that host 0 has to finish its requests


def serve_worker(args: ServerArgs, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve this host's part until its engine process ends, and return the process's exit code."""

    async def run() -> int:
        return await _WorkerServer(args, engine_command).run()

    try:
        exit_code: int = uvloop.run(run())
        return exit_code
    except (ValueError, OSError, ChannelError) as error:
        print(f"sgl_jax cannot serve: {error}", file=sys.stderr, flush=True)
        return FAILED


class _WorkerServer:
    def __init__(self, args: ServerArgs, engine_command: Sequence[str]) -> None:
        self._args = args
        self._engine_command = engine_command
        self._health = EngineHealth(args.engine_heartbeat_timeout)
        self._client = EngineClient()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[ExitReport] = self._loop.create_future()
        self._signalled = asyncio.Event()
        self._failure: EngineFailed | None = None
        self._is_ready = False
        self._registry = CollectorRegistry()
        self._metrics = HostMetrics(args.model_name)
        self._registry.register(self._metrics)
        self._process: EngineProcess | None = None

    async def run(self) -> int:
        end_on_signals(self._signalled, lambda: self._process)
        rank = self._args.node_rank
        routes = [
            Route("/health", self._answer_health),
            Route("/liveness", self._answer_liveness),
            Route("/metrics", self._answer_metrics),
        ]
        app = Starlette(routes=[*routes, Route("/{path:path}", self._refuse)])
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._client.close)
            listener = stack.enter_context(listening_socket(self._args))
            self._client.listen(self._on_message, lambda error: logger.error("%s", error))
            self._process = process = EngineProcess(
                self._args, self._client.engine_end, self._on_exit, self._engine_command
            )
            stack.callback(process.kill)
            await stack.enter_async_context(http_on(app, Limits.of(self._args), listener))
            logger.info("host %d at %s; its engine starts", rank, url_of(listener))
            signalled = asyncio.ensure_future(self._signalled.wait())
            silent = asyncio.ensure_future(until_silent(self._health))
            for waiting in (signalled, silent):
                stack.callback(waiting.cancel)
            first = (self._ended, signalled, silent)
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if silent.done():
                logger.error("the engine process is silent; the other hosts go on without it")
                return HOST_LOST
            if not self._ended.done():
                await self._leave()
            if not self._ended.done():
                logger.error("the engine did not end in time; it is killed")
                return FAILED
            return self._exit_code(self._ended.result())

    async def _leave(self) -> None:
        """Request that host 0 end the engine, and wait until this host's process has ended."""
        notify_systemd("STOPPING=1")
        if not self._is_ready or self._health.stuck_since:  # the process reads no messages
            assert self._process is not None
            self._process.kill()
        else:
            logger.info("host 0 finishes the running requests, and ends the engine")
            self._client.send(Shutdown())
        await asyncio.wait(
            (self._ended,), timeout=self._args.drain_timeout + _ENGINE_STOP_TIMEOUT_S
        )

    def _exit_code(self, report: ExitReport) -> int:
        if report.exit_code == 0 or (self._signalled.is_set() and not self._is_ready):
            return 0
        logger.error("%s", report if self._failure is None else self._failure.message)
        if report.exit_code == -signal.SIGABRT:  # raised by jax when host 0 has ended
            return HOST_LOST
        return report.exit_code if report.exit_code in GROUP_CODES else FAILED

    def _on_message(self, message: EngineMessage) -> None:
        if isinstance(message, Heartbeat):
            self._health.note(message)
            if message.figures is not None:
                self._metrics.hosts = [HostReport(self._args.node_rank or 0, message.figures)]
        elif isinstance(message, EngineFailed):
            self._failure = message
        elif isinstance(message, EngineInfo):
            self._is_ready = True
            print(f"sgl_jax host {self._args.node_rank} is ready", flush=True)
            notify_systemd("READY=1")

    def _on_exit(self, report: ExitReport) -> None:
        """Record the exit; runs on a thread of the process's handle."""

        def end() -> None:
            if not self._ended.done():
                self._ended.set_result(report)

        self._loop.call_soon_threadsafe(end)

    async def _answer_health(self, request: Request) -> Response:
        return health_answer(self._check, self._health, "ready")

    async def _answer_liveness(self, request: Request) -> Response:
        status = "ready" if self._is_ready else "starting"
        return health_answer(self._check_live, self._health, status)

    def _check_live(self) -> None:
        if self._ended.done():
            raise EngineDeadError("the engine process has ended")
        self._health.check()

    def _check(self) -> None:
        self._check_live()
        if self._signalled.is_set():
            raise ShuttingDownError("this host ends")
        if not self._is_ready:
            raise starting_error()

    async def _answer_metrics(self, request: Request) -> Response:
        text = generate_latest(self._registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _refuse(self, request: Request) -> Response:
        reason = "this host serves only /health, /liveness and /metrics; send requests to host 0"
        return error_response(ApiError(404, reason), request.url.path)
