"""A server from start to end: HTTP up, engine process up, signals, drain, exit code.

    at first:          HTTP answers 503 "starting" until the engine is ready
    SIGTERM or SIGINT: refuse new requests (503), finish the running ones, exit 0
    again:             exit at once
    engine ends:       log it, end open streams with an error event, exit by core/errors.py

Owns the engine process, the sockets to it, the text workers and the listening socket. Must never
import jax.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from sgl_jax.core.engine_messages import (
    EndRequested,
    EngineFailed,
    EngineInfo,
    EngineMessage,
    Heartbeat,
)
from sgl_jax.core.errors import (
    ENGINE_CODES,
    FAILED,
    HOST_LOST,
    KILLED_BY_SIGNAL,
    EngineDeadError,
    ShuttingDownError,
)
from sgl_jax.core.messages import ContinueGeneration, Shutdown
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import ChannelError, EngineClient
from sgl_jax.engine.front.frontend import Frontend
from sgl_jax.engine.front.health import EngineHealth
from sgl_jax.engine.loop.garbage import collect_seldom
from sgl_jax.engine.opening import open_model_files, open_tracer
from sgl_jax.engine.process import ENGINE_COMMAND, EngineProcess, ExitReport
from sgl_jax.metrics.engine_metrics import EngineMetrics
from sgl_jax.server.admin.management import Gate
from sgl_jax.server.app import build_app, with_cors
from sgl_jax.server.guards.keys import ApiKeys
from sgl_jax.server.guards.limits import Limits
from sgl_jax.server.guards.origins import warn_if_exposed
from sgl_jax.server.listening import http_on, listening_socket, notify_systemd, url_of
from sgl_jax.server.references import References
from sgl_jax.server.text_pool import TextPool
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.worker_process import TextWorkers

T = TypeVar("T")
logger = logging.getLogger(__name__)
_ENGINE_STOP_TIMEOUT_S = 15.0
_SAVE_TIMEOUT_S = 120.0  # added if the engine saves its cache
_DRAIN_POLL_S = 0.05
_SILENCE_POLL_S = 1.0
_TOKENIZER_TIMEOUT_S = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(args: ServerArgs, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until a signal, and return the process's exit code.

    Args:
        engine_command: command of the engine process; tests pass a scripted engine.
    """
    try:
        exit_code: int = uvloop.run(_serve(args, engine_command))
        return exit_code
    except (ValueError, OSError, ChannelError, EngineDeadError, MemoryError) as error:
        reason = str(error) or "out of memory"
        print(f"sgl_jax cannot serve: {reason}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, EngineDeadError) else FAILED
    finally:
        for number in _SIGNALS:  # the interpreter is ending with this code
            signal.signal(number, signal.SIG_IGN)


async def _serve(args: ServerArgs, engine_command: Sequence[str]) -> int:
    code = 1
    try:
        code = await _Server(args, engine_command).run()
    finally:  # from now on a signal must not change the exit code
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, lambda number, frame: os._exit(code))
    return code


class _Server:
    def __init__(self, args: ServerArgs, engine_command: Sequence[str]) -> None:
        self._args = args
        self._keys = ApiKeys.from_args(args)
        self._tracer = open_tracer(args)
        self._engine_command = engine_command
        self._text_workers = TextWorkers(args.tokenizer_folder, args.chat_template)
        self._texts = TextPool(self._text_workers)
        self._health = EngineHealth(args.engine_heartbeat_timeout)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()  # engine facts
        self._stop = asyncio.Event()  # a signal came, or the engine died
        self._death: str | None = None
        self._exit_code = FAILED  # if the engine dies
        self._engine_may_end = False
        self._process: EngineProcess | None = None
        self._frontend: Frontend | None = None
        self._client = EngineClient()

    async def run(self) -> int:
        end_on_signals(self._stop, lambda: self._process)
        stopping = asyncio.ensure_future(self._stop.wait())
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(stopping.cancel)
            if self._tracer is not None:
                stack.push_async_callback(asyncio.to_thread, self._tracer.close)
            stack.callback(self._client.close)
            listener = stack.enter_context(listening_socket(self._args))
            warn_if_exposed(self._args, self._keys)
            stack.callback(self._text_workers.close)
            stack.push_async_callback(self._stop_engine)
            stack.push_async_callback(self._texts.close)
            unreadable = "the engine sent a message that cannot be read"
            self._client.listen(self._on_message, lambda e: self._on_death(str(e), unreadable))
            self._process = EngineProcess(
                self._args, self._client.engine_end, self._on_exit, self._engine_command
            )
            if self._args.num_hosts > 1:
                silence = asyncio.ensure_future(self._end_if_silent())
                stack.callback(silence.cancel)
            gate = Gate(self._health)
            public = with_cors(gate, self._args)
            limits = Limits.of(self._args)
            serving = await stack.enter_async_context(http_on(public, limits, listener))
            logger.info("listening at %s; the engine starts", url_of(listener))
            loading = _in_thread(lambda: open_model_files(self._args))
            stack.callback(loading.cancel)
            refs = await self._start(loading, stopping)
            if refs is None:  # stopped while starting
                return 0
            app = build_app(refs, self._keys)
            self._texts.start()
            if refs.frontend.tokenizer.chat_template:
                probing = asyncio.ensure_future(self._texts.probe())
                stack.callback(probing.cancel)
                await asyncio.wait((probing, stopping), return_when=asyncio.FIRST_COMPLETED)
            # Existing objects live as long as the process. A full collection of all of them
            # (modules, vocabulary) would block every client.
            collect_seldom()
            gate.open(app)
            logger.info("serving %s as %r", self._args.model_path, refs.model_name)
            print(f"sgl_jax is ready at {url_of(listener)}", flush=True)
            notify_systemd("READY=1")
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self._death is None:
                await self._drain(refs)
            return self._exit_code if self._death is not None or not self._stop.is_set() else 0

    async def _start(
        self, loading: "asyncio.Future[Tokenizer]", stopping: "asyncio.Future[Any]"
    ) -> References | None:
        """Wait for the engine while the tokenizer loads. Return None if a signal came first."""
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait((loading, stopping), return_when=first, timeout=_TOKENIZER_TIMEOUT_S)
        if not loading.done() and not stopping.done():
            raise ValueError(
                f"the tokenizer in {self._args.tokenizer_folder!r} did not load and write a "
                f"conversation by its chat template within {_TOKENIZER_TIMEOUT_S:g} s"
            )
        if loading.done():
            # The workers load it too, but only after it was loaded here.
            if loading.result().can_encode:
                self._text_workers.start()
            await asyncio.wait((self._ready, stopping), return_when=first)
        if self._death is not None:
            raise EngineDeadError(f"the engine did not start: {self._death}", self._exit_code)
        if self._stop.is_set():
            return None
        args, info = self._args, self._ready.result()
        tokenizer, send = loading.result(), self._client.send
        self._frontend = front = Frontend(args, tokenizer, info, send, self._tracer)
        takes_images = info.get("images") is not None
        limits = Limits.of(args, front.checks.max_prompt_chars, takes_images=takes_images)
        metrics = EngineMetrics(front.metrics)
        return References(args, front, info, metrics, limits, self._texts, self._health)

    async def _drain(self, refs: References) -> None:
        refs.draining = True
        frontend = refs.frontend
        logger.info("shutting down: %d requests to finish", frontend.num_open)
        notify_systemd("STOPPING=1")
        if refs.is_paused:
            frontend.call(ContinueGeneration(), lambda reply: None)
        deadline = time.monotonic() + self._args.drain_timeout

        def num_open() -> int:
            return frontend.num_open + refs.texts.num_open

        while num_open() and time.monotonic() < deadline and self._death is None:
            if self._health.stuck_since:  # nothing will finish
                logger.error("the engine is stuck; %d requests end unfinished", frontend.num_open)
                shown = "the server is shutting down, and its engine is stuck"
                frontend.fail(shown, ShuttingDownError)
                return
            await asyncio.sleep(_DRAIN_POLL_S)
        if num_open():
            logger.warning("%d requests did not finish in time", num_open())
            frontend.fail(
                "the server is shutting down, and the request did not finish within the "
                f"{self._args.drain_timeout:g} s that it had left",
                ShuttingDownError,
            )

    async def _stop_engine(self) -> None:
        self._engine_may_end = True
        if self._process is None:
            return
        is_deaf = (self._frontend is None and self._death is None) or self._health.stuck_since
        if is_deaf or not self._process.is_alive:
            self._process.kill()  # the engine compiles or is stopped, and reads no messages
            return
        self._client.send(Shutdown())
        save_s = 0.0 if self._args.restore_cache is None else _SAVE_TIMEOUT_S
        await asyncio.to_thread(self._process.stop, _ENGINE_STOP_TIMEOUT_S + save_s)

    def _on_message(self, message: EngineMessage) -> None:
        if isinstance(message, EngineInfo):
            if self._ready.done():
                self._ready.result().update(message.info)  # shared with `References`
            else:
                self._ready.set_result(message.info)
        elif isinstance(message, Heartbeat):
            self._health.note(message)
        elif isinstance(message, EndRequested):
            logger.info("host %d was ended by a signal; this engine ends, too", message.host)
            self._stop.set()
        elif isinstance(message, EngineFailed):
            shown = "the engine failed; see the server's log"
            self._on_death(message.message, shown, message.exit_code)
        elif self._frontend is not None:
            self._frontend.handle(message)

    def _on_exit(self, report: ExitReport) -> None:
        """Handle the engine's exit; runs on a thread of the process's handle."""
        code = report.exit_code if report.exit_code in ENGINE_CODES else FAILED
        self._loop.call_soon_threadsafe(self._on_death, str(report), report.how, code)

    def _on_death(self, reason: str, shown: str, exit_code: int = FAILED) -> None:
        """Record that the engine cannot continue. The first reason counts. Clients see `shown`."""
        if self._engine_may_end or self._death is not None:
            return
        self._death, self._exit_code = reason, exit_code
        if self._ready.done():  # otherwise the start fails with this reason
            logger.error("%s", reason)
        if self._frontend is not None:
            self._frontend.fail(shown)
        self._stop.set()

    async def _end_if_silent(self) -> None:
        """End after too long a silence of the engine, since other hosts have then ended."""
        await until_silent(self._health)
        if self._process is not None:
            reason = "the engine process is silent"
            self._on_death(reason, reason, HOST_LOST)
            self._process.kill()


def end_on_signals(stop: asyncio.Event, process: Callable[[], EngineProcess | None]) -> None:
    """Set `stop` after the first signal. After the second, kill the engine and exit at once."""
    num_signals = 0

    def handle(number: int) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            logger.info("got %s; again to exit at once", signal.Signals(number).name)
            stop.set()
            return
        engine = process()
        if engine is not None:
            engine.kill()
        os._exit(KILLED_BY_SIGNAL + number)

    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, handle, number)


async def until_silent(health: EngineHealth) -> None:
    while health.stuck_since is None:
        await asyncio.sleep(_SILENCE_POLL_S)


def _in_thread(call: Callable[[], T]) -> "asyncio.Future[T]":
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(done)
