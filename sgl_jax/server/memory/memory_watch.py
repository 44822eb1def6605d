"""Reads the engine's memory while there are viewers, and sends the frames to all of them.

One task reads for all viewers, at most ten times a second. It then pauses in proportion to the
reading's processor time, so that a large memory is read less often instead of slowing down the
steps. A viewer that does not keep up skips frames.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import cache
from typing import Any

from sgl_jax.core.errors import EngineDeadError, EngineStuckError, QueueFullError, ShuttingDownError
from sgl_jax.core.messages import ReadMemory
from sgl_jax.memory_view.frames import FrameBuilder
from sgl_jax.server.answer_stream import named_event
from sgl_jax.server.engine_calls import call_engine
from sgl_jax.server.errors import ApiError
from sgl_jax.server.references import References

logger = logging.getLogger(__name__)

MAX_VIEWERS = 32
_SAMPLES_KEPT_S = 600.0
_MIN_INTERVAL_S = 0.1
_MIN_TREE_INTERVAL_S = 1.0
# Pause after a reading, as a multiple of its processor time in engine and server: 1/200 and 1/400
# of a core.
_REST = 200
_TREE_REST = 400
_SAMPLE_INTERVAL_S = 1.0
_RETRY_S = 1.0
_LOOK_INTERVAL_S = 0.5  # upper bound on the delay until streams end at shutdown
_EVENTS_WAITING = 8  # maximum for a viewer; a frame has up to some hundred KiB
_KEEP_ALIVE = b": no frame: the engine is busy\n\n"


class MemoryWatch:
    """The viewers of one server, and the samples taken for them in the last ten minutes.

    Times are monotonic seconds since this object's creation.
    """

    def __init__(self, refs: References) -> None:
        self._refs = refs
        self._shows_text = refs.args.memory_view_text
        self._frames = FrameBuilder(refs.frontend.tokenizer.decode if self._shows_text else None)
        self._viewers: set[_Viewer] = set()
        self._reading: asyncio.Task[None] | None = None
        self._tree: bytes | None = None  # last event with the trees
        self._started_at = time.monotonic()
        self._samples: deque[dict[str, Any]] = deque()

    def samples(self) -> list[dict[str, Any]]:
        while self._samples and self._samples[0]["time_s"] < self._now_s() - _SAMPLES_KEPT_S:
            self._samples.popleft()
        return list(self._samples)

    def _now_s(self) -> float:
        return time.monotonic() - self._started_at

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one viewer, a key frame first.

        They end with the engine or the server, or if no frame can be made. Raises `ApiError` 503
        for too many viewers.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(503, f"{MAX_VIEWERS} viewers watch the memory, which is the limit")
        viewer = _Viewer(self._tree)
        self._viewers.add(viewer)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_on())
        try:
            while (event := await viewer.take()) is not None:
                yield event
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._reading is not None:
                self._reading.cancel()
                self._reading = None

    async def _read_on(self) -> None:
        try:
            await self._read_until_end()
        except Exception:
            logger.exception("the memory view ends: no frame can be made")
        self._send(None)

    async def _read_until_end(self) -> None:
        tree_due = 0.0
        frame_s = 0.0  # processor time of the last reading without trees
        while not self._refs.draining:
            has_tree = time.monotonic() >= tree_due
            message = ReadMemory(has_tree=has_tree, has_tokens=self._shows_text)
            try:
                reply = await call_engine(self._refs, message)
            except (EngineDeadError, ShuttingDownError):
                return
            except (ApiError, EngineStuckError, QueueFullError):
                reply = None
            if reply is None or not reply.ok:
                self._send(_KEEP_ALIVE)
                await self._rest(_RETRY_S)
                continue
            snapshot, started = reply.data, time.thread_time()
            self._publish(snapshot)
            cost_s = snapshot["build_s"] + time.thread_time() - started
            if has_tree:
                tree_due = time.monotonic() + max(_MIN_TREE_INTERVAL_S, _TREE_REST * cost_s)
            else:
                frame_s = cost_s
            await self._rest(max(_MIN_INTERVAL_S, _REST * frame_s))

    async def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._refs.draining and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _LOOK_INTERVAL_S))

    def _publish(self, snapshot: dict[str, Any]) -> None:
        now_s = self._now_s()
        frame = named_event("frame", self._frames.add(snapshot, now_s))
        key_frame = cache(lambda: named_event("frame", self._frames.key_frame()))
        for viewer in self._viewers:
            viewer.put_frame(frame, key_frame)
        if "tree" in snapshot:
            self._tree = named_event("tree", self._frames.tree(snapshot))
            self._send(self._tree)
        samples = self.samples()
        if not samples or now_s - samples[-1]["time_s"] >= _SAMPLE_INTERVAL_S:
            self._samples.append(self._frames.sample())

    def _send(self, event: bytes | None) -> None:
        for viewer in self._viewers:
            viewer.put(event)


class _Viewer:
    """The events that a viewer has not taken yet; None ends them."""

    def __init__(self, tree: bytes | None) -> None:
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._needs_key = True
        self._tree = tree  # sent after the first frame

    async def take(self) -> bytes | None:
        return await self._events.get()

    def put(self, event: bytes | None) -> None:
        self._make_room()
        self._events.put_nowait(event)

    def put_frame(self, frame: bytes, key_frame: Callable[[], bytes]) -> None:
        self._make_room()
        self._events.put_nowait(key_frame() if self._needs_key else frame)
        self._needs_key = False
        if self._tree is not None:
            self.put(self._tree)
            self._tree = None

    def _make_room(self) -> None:
        """Drop the queued events if there are too many. The next frame is then a key frame."""
        if self._events.qsize() < _EVENTS_WAITING:
            return
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                self._events.get_nowait()
        self._needs_key = True
