"""The life of a server: engine process up, HTTP up, signals, drain, and an honest exit code.

    SIGTERM or SIGINT: refuse new requests (503), finish the running ones, exit 0
    again:             exit at once
    engine dies:       say so, end open streams with an error event, exit 1

Owns the engine process, the sockets to it, the text workers and the listening socket. Must never
import jax.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import uvicorn
import uvloop

from sgl_jax.core.errors import EngineDeadError
from sgl_jax.core.messages import EngineMessage, EngineReady, Shutdown
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.frontend import EngineFacts, Frontend
from sgl_jax.engine.process import ENGINE_COMMAND, EngineProcess
from sgl_jax.engine.zmq_channel import ChannelError, ZmqEngineClient
from sgl_jax.metrics.engine_metrics import EngineMetrics
from sgl_jax.metrics.request_metrics import RequestMetrics
from sgl_jax.server.api_keys import ApiKeys
from sgl_jax.server.app import build_app
from sgl_jax.server.context import ServerContext
from sgl_jax.server.http_guard import guarded_protocol
from sgl_jax.server.limits import Limits
from sgl_jax.server.text_pool import TextPool
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.worker_process import TextWorkers

logger = logging.getLogger(__name__)

_LAST_BYTES_TIMEOUT_S = 5  # for answers still being written when the server stops
_ENGINE_STOP_TIMEOUT_S = 15.0
_DRAIN_POLL_S = 0.05
_START_POLL_S = 0.01
_FILES_BESIDE_CONNECTIONS = 256  # files and sockets of the process that are not connections
_KILLED_BY_SIGNAL = 128  # the shell's convention: 128 + signal number


def serve(args: ServerArgs, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until told to stop; returns the process's exit code.

    Args:
        engine_command: what to run as the engine process; tests put a scripted one here.
    """
    try:
        exit_code: int = uvloop.run(_Server(args, engine_command).run())
    except (ValueError, OSError, ChannelError, EngineDeadError) as error:
        print(f"sgl_jax cannot serve: {error}", file=sys.stderr, flush=True)
        return 1
    return exit_code


class _Uvicorn(uvicorn.Server):
    """Leaves the signals alone: `_Server` owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(self, args: ServerArgs, engine_command: Sequence[str]) -> None:
        self._args = args
        self._keys = ApiKeys.from_args(args)
        self._engine_command = engine_command
        self._text_workers = TextWorkers(args.tokenizer_path or args.model_path, args.chat_template)
        self._stop = asyncio.Event()  # a signal came, or the engine died
        self._death: str | None = None
        self._ready: asyncio.Future[EngineReady]
        self._process: EngineProcess | None = None
        self._engine_may_end = False
        self._frontend: Frontend | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()

        def on_exit(reason: str) -> None:
            loop.call_soon_threadsafe(self._on_death, reason)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        with _listening_socket(self._args) as listener:
            client = ZmqEngineClient()
            try:
                client.listen(self._on_message, lambda error: self._on_death(str(error)))
                self._process = EngineProcess(
                    self._args, client.folder, on_exit, self._engine_command
                )
                try:
                    context = await self._start(client)
                    if context is None:  # stopped while starting
                        return 0
                    context.texts.start()
                    try:
                        return await self._serve_http(context, listener)
                    finally:
                        await context.texts.close()
                finally:
                    await self._stop_engine(client)
            finally:
                self._text_workers.close()
                client.close()

    async def _start(self, client: ZmqEngineClient) -> ServerContext | None:
        """Wait for the engine; the tokenizer loads meanwhile. None if a signal came first."""
        loading = asyncio.ensure_future(
            asyncio.to_thread(
                Tokenizer.load,
                self._args.tokenizer_path or self._args.model_path,
                self._args.chat_template,
            )
        )
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            tokenizer = await loading
            self._text_workers.start()  # not before it is known that the tokenizer can be read
            await asyncio.wait((self._ready, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._death is not None:
            raise EngineDeadError(f"the engine did not start: {self._death}")
        if self._stop.is_set():
            return None
        info = self._ready.result().info
        metrics = RequestMetrics()
        self._frontend = Frontend(
            tokenizer,
            EngineFacts.from_info(info),
            client,
            metrics=metrics,
            log_requests=self._args.log_requests,
        )
        limits = Limits.of(self._args, self._frontend.max_prompt_chars)
        texts = TextPool(self._text_workers, limits)
        return ServerContext(
            self._args, self._frontend, info, EngineMetrics(metrics), limits, texts
        )

    async def _serve_http(self, context: ServerContext, listener: socket.socket) -> int:
        _allow_files(context.limits.max_connections + _FILES_BESIDE_CONNECTIONS)
        config = uvicorn.Config(
            build_app(context, self._keys),
            http=guarded_protocol(context.limits),
            ws="none",
            log_config=None,
            log_level="error",  # its warnings are what clients do wrong
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_LAST_BYTES_TIMEOUT_S,
        )
        server = _Uvicorn(config)
        # What was built lives as long as the process. A full collection that looked through all of
        # it, modules and vocabulary, would hold up every client.
        gc.collect()
        gc.freeze()
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not serving.done():  # "ready" means that one can connect
            await asyncio.sleep(_START_POLL_S)
        if serving.done():
            await serving
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info("serving %s as %r", self._args.model_path, context.model_name)
        print(f"sgl_jax is ready at http://{shown}:{port}", flush=True)
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._death is None:
            await self._drain(context)
        server.should_exit = True
        await serving
        return 1 if self._death is not None or not self._stop.is_set() else 0

    async def _drain(self, context: ServerContext) -> None:
        """Let the running requests finish, up to the time allowed; the rest ends with an error."""
        context.draining = True
        frontend = context.frontend
        logger.info("shutting down: %d requests to finish", frontend.num_open)
        deadline = time.monotonic() + self._args.drain_timeout

        def is_busy() -> bool:
            return bool(frontend.num_open or context.texts.num_open)

        while is_busy() and time.monotonic() < deadline and self._death is None:
            await asyncio.sleep(_DRAIN_POLL_S)
        if frontend.num_open:
            logger.warning("%d requests did not finish in time", frontend.num_open)
            frontend.fail("the server is shutting down")

    async def _stop_engine(self, client: ZmqEngineClient) -> None:
        self._engine_may_end = True
        if self._process is None or not self._process.is_alive:
            return
        if self._frontend is None:  # it is compiling and listens to nobody
            self._process.kill()
            return
        client.send(Shutdown())
        await asyncio.to_thread(self._process.stop, _ENGINE_STOP_TIMEOUT_S)

    def _on_message(self, message: EngineMessage) -> None:
        if isinstance(message, EngineReady):
            if not self._ready.done():
                self._ready.set_result(message)
        elif self._frontend is not None:
            self._frontend.handle(message)

    def _on_death(self, reason: str) -> None:
        if self._engine_may_end:
            return
        if self._frontend is not None and self._frontend.death is not None:
            reason = f"{self._frontend.death} ({reason})"
        self._death = reason
        logger.error("%s", reason)
        if self._frontend is not None:
            self._frontend.fail(reason)
        self._stop.set()

    def _on_signal(self, number: int) -> None:
        if not self._stop.is_set():
            logger.info("got %s; again to exit at once", signal.Signals(number).name)
            self._stop.set()
            return
        if self._process is not None:
            self._process.kill()
        os._exit(_KILLED_BY_SIGNAL + number)


def _allow_files(num_files: int) -> None:
    """Let this process open so many files; where the system allows fewer, say so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < num_files:
        logger.warning(
            "the system allows %d open files, --max-connections needs %d (ulimit -n)",
            wanted,
            num_files,
        )


def _listening_socket(args: ServerArgs) -> socket.socket:
    """Take the port before the engine starts: minutes of warm-up are a bad time to learn that
    it is taken."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((args.host, args.port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {args.host}:{args.port}: {error.strerror}") from error
    return listener
