"""The engine in a separate process: its start, its supervision, and the child's main function.

The child is `python -m sgl_jax.engine` (only its `__main__.py` imports jax). It reads one line of
JSON from its standard input, `{"args": {...}, "socket": 5}`, where `socket` is an inherited file
descriptor. When that pipe ends, the parent has ended, and the child exits to free the device. The
child's output is forwarded to the parent's terminal; the report of its exit has the last line.
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from sgl_jax.core.engine_messages import EngineFailed, EngineInfo, Heartbeat
from sgl_jax.core.errors import (
    FAILED,
    GROUP_REFUSED,
    HOST_LOST,
    STEPS_FAILED,
    GroupError,
    StepsFailedError,
)
from sgl_jax.core.log_lines import log_to_terminal
from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import Channel, SocketChannel
from sgl_jax.engine.loop.garbage import collect_if_many, schedule_collection
from sgl_jax.engine.watchdog import Watchdog

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "sgl_jax.engine")
_LAST_LINE_BYTES = 4096


class Core(Protocol):
    """The program of the child: `EngineCore`, `WorkerCore`, or a scripted program in tests."""

    info: dict[str, Any]

    def run(self, channel: Channel, *, after_turn: Callable[[bool], object] | None = None) -> None:
        """Serve until `Shutdown`. `after_turn` gets True after a turn with nothing to do."""
        ...


class ExitReport(NamedTuple):
    exit_code: int  # or the negative number of a signal
    how: str  # a sentence with the exit code or signal; may be shown to clients
    last_line: str  # last line of output, only for the operator; "" if there was none

    def __str__(self) -> str:
        return f"{self.how}; its last line: {self.last_line}" if self.last_line else self.how


class EngineProcess:
    def __init__(
        self,
        args: ServerArgs,
        engine_end: socket.socket,
        on_exit: Callable[[ExitReport], None],
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        """Start the process.

        Args:
            args: the engine's settings.
            engine_end: the engine's end of the channel; this process's copy is closed.
            on_exit: called once, on a thread of this object, when the process has ended for any
                reason.
            command: program to run; tests pass a scripted engine.
        """
        self._on_exit = on_exit
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(engine_end.fileno(),),
            start_new_session=True,  # Ctrl-C reaches only the parent, which then stops the child
            umask=0o077,  # files hold prompts, KV and recordings
        )
        assert self._process.stdin is not None
        # If the child has already died, the report of its exit is better than a broken pipe error.
        with contextlib.suppress(BrokenPipeError):
            start = {"args": dataclasses.asdict(args), "socket": engine_end.fileno()}
            self._process.stdin.write(json.dumps(start).encode() + b"\n")
            self._process.stdin.flush()
        engine_end.close()
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout_s: float) -> None:
        """Wait `timeout_s` for the process to end after `Shutdown`, or kill it. Report the exit."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the engine did not end within %.0f s; killing it", timeout_s)
            self._process.kill()
        self._report()

    def kill(self) -> None:
        self._process.kill()
        self._report()

    def _report(self) -> None:
        self._process.wait()
        self._watcher.join(timeout=5.0)

    def _watch(self) -> None:
        assert self._process.stdout is not None
        tail = b""
        while data := os.read(self._process.stdout.fileno(), 65536):
            tail = (tail + data)[-_LAST_LINE_BYTES:]
            # If the terminal is closed, keep reading, or the child would block.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        lines = tail.decode(errors="replace").strip().splitlines()
        last_line = lines[-1].strip() if lines else ""
        self._on_exit(ExitReport(code, f"the engine process {how}", last_line))


def run_engine(build: Callable[[ServerArgs, Progress], Core]) -> int:
    """Build the engine, send its `EngineInfo`, and run it: the main function of the child.

    Returns the exit code.
    """
    # A service manager signals all processes of a service, but the parent decides when to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    start = json.loads(sys.stdin.buffer.readline())
    args = ServerArgs(**start["args"])
    log_to_terminal(args.log_level, args.log_format)
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    os.set_inheritable(start["socket"], False)
    channel = SocketChannel(socket.socket(fileno=start["socket"]))
    core: Core | None = None
    try:
        progress = Progress()
        with Watchdog(channel.send, progress):
            core = build(args, progress)
        schedule_collection()
        # Without this the server, although ready, would still report the last phase of the start.
        channel.send(Heartbeat(turn_s=None, progress=progress.report))
        channel.send(EngineInfo(info=core.info))
        core.run(channel, after_turn=collect_if_many)
    except Exception as error:
        code = FAILED
        if isinstance(error, GroupError):
            code = GROUP_REFUSED if core is None else HOST_LOST
        elif isinstance(error, StepsFailedError):
            code = STEPS_FAILED
        # The message explains a refused setting or file; the traceback is logged for debugging.
        if core is None and isinstance(error, (ValueError, OSError, GroupError)):
            message = str(error)
            logger.debug("the engine was refused", exc_info=error)
        else:
            message = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            # Printed last, so that the operator reads it first.
            print(message, file=sys.stderr, flush=True)
        channel.send(EngineFailed(message=message, exit_code=code))
        return code
    finally:
        channel.close()
    return 0


def _die_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)
