"""Notes each wait of one thread that has no deadline and would really have to wait.

Locks count if they are made within `watching`: all of the engine's are, if it is built there.
"""

import concurrent.futures
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sgl_jax

_PACKAGE = str(Path(sgl_jax.__file__).parent)


@dataclass
class Waits:
    """`thread` is watched; `found` has a stack for each wait that our own code began."""

    thread: threading.Thread | None = None
    found: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        if threading.current_thread() is not self.thread:
            return
        frames = traceback.extract_stack()
        ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
        callers = [f for f in frames if "threading" not in f.filename and f.filename != __file__]
        # A wait within jax is for the device, or for jax's own short work.
        if ours and callers[-1] in ours:
            self.found.append(f"{what}\n{''.join(traceback.format_list(frames))}")


class _WatchedLock:
    def __init__(self, lock: Any, waits: Waits) -> None:
        self._lock, self._waits = lock, waits

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and timeout < 0:
            if self._lock.acquire(False):
                return True
            self._waits.note("Lock.acquire")
        acquired: bool = self._lock.acquire(blocking, timeout)
        return acquired

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


@contextmanager
def watching(monkeypatch: Any) -> Iterator[Waits]:
    waits = Waits()

    def watched(wait: Callable[..., Any], is_over: Callable[[Any], bool]) -> Callable[..., Any]:
        def call(self: Any, timeout: float | None = None) -> Any:
            if timeout is None and not is_over(self):
                waits.note(wait.__qualname__)
            return wait(self, timeout)

        return call

    future = concurrent.futures.Future
    with monkeypatch.context() as patch:
        for name in ("result", "exception"):
            patch.setattr(future, name, watched(getattr(future, name), lambda f: f.done()))
        patch.setattr(
            threading.Condition, "wait", watched(threading.Condition.wait, lambda _: False)
        )
        patch.setattr(
            threading.Thread, "join", watched(threading.Thread.join, lambda t: not t.is_alive())
        )
        for name in ("Lock", "RLock"):
            make = getattr(threading, name)
            patch.setattr(threading, name, lambda make=make: _WatchedLock(make(), waits))
        yield waits
