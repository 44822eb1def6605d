"""The memory view of a recording: `python -m sgl_jax.replay FILE --view`.

The recording is replayed once, and a frame is kept after each planned step, or after every second,
fourth ... step of a long recording. A query about a page or a prefix replays it up to that frame,
because a scheduler cannot go back.
"""

import socket
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import DescribePage, FindPrefix, ReadMemory
from sgl_jax.core.request_limits import INT32, check_between
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.memory_view import MEMORY_PAGE
from sgl_jax.memory_view.frames import FrameBuilder, ViewFacts, added_up
from sgl_jax.memory_view.reader import MemoryReader
from sgl_jax.replay.player import DifferenceError, Player
from sgl_jax.scheduler.events import Planned, Tick
from sgl_jax.scheduler.record.event_log import EventReader
from sgl_jax.server.answer_stream import json_response
from sgl_jax.server.guards.origins import OriginMiddleware
from sgl_jax.server.static_pages import page_routes

MAX_FRAMES = 4000
_MAX_DIGITS = 9
_MAX_CONTENT_BYTES = 512 << 20  # compressed size of all frames


class _Kept(NamedTuple):
    num_events: int  # events of the recording up to the frame
    content: bytes  # frame and tree as compressed JSON
    sample: dict[str, Any]


class RecordedFrames:
    """The frames of the recording in `path`.

    If the scheduler does not repeat the recording, the frames end at the difference, and
    `difference` has the reason.

    Raises `RecordingError` or OSError if the recording cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._frames: list[_Kept] = []
        self._num_bytes = 0  # total size of the contents
        self._every = 1
        self.difference = ""
        with path.open("rb") as file:
            reader = EventReader(file)
            self.dp_size, self.page_size = (
                reader.started.sizes.dp_size,
                reader.started.sizes.page_size,
            )
            self._keep_frames(reader)

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [kept.sample for kept in self._frames]

    def content(self, number: int) -> bytes:
        """Return frame and tree as JSON. Raises `InvalidRequestError` for an unknown frame."""
        kept = self._kept(number)
        content = msgspec.json.decode(zlib.decompress(kept.content))
        # These change when frames are dropped.
        content["frame"] |= {"number": number, "marks": kept.sample["marks"]}
        return msgspec.json.encode(content)

    def reader_at(self, number: int) -> MemoryReader:
        """Return a reader of the memory at that frame, after replaying the recording up to it."""
        num_events = self._kept(number).num_events
        with self._path.open("rb") as file:
            events = EventReader(file)
            player = Player(events.started)
            for event in events:
                player.feed(event)
                if player.num_events == num_events:
                    break
        return MemoryReader(player.scheduler)

    def _kept(self, number: int) -> _Kept:
        check_between("frame", number, 0, len(self._frames) - 1)
        return self._frames[number]

    def _keep_frames(self, events: EventReader) -> None:
        player = Player(events.started)
        reader = MemoryReader(player.scheduler)
        frames = FrameBuilder()
        started_at: float | None = None
        now_s = 0.0
        num_steps = 0
        try:
            for event in events:
                player.feed(event)
                if isinstance(event, Tick):
                    started_at = event.now_s if started_at is None else started_at
                    now_s = event.now_s - started_at
                if isinstance(event, Planned) and event.plan is not None:
                    num_steps += 1
                    if num_steps % self._every == 0:
                        self._keep(player.num_events, reader, frames, now_s)
        except DifferenceError as error:
            self.difference = str(error)
        if not self._frames or self._frames[-1].num_events < player.num_events:
            self._keep(player.num_events, reader, frames, now_s)

    def _keep(
        self, num_events: int, reader: MemoryReader, frames: FrameBuilder, now_s: float
    ) -> None:
        snapshot = reader.read(ReadMemory(has_tree=True))
        frames.add(snapshot, now_s)
        content = {"frame": frames.key_frame(), "tree": frames.tree(snapshot)}
        packed = zlib.compress(msgspec.json.encode(content), 1)
        self._frames.append(_Kept(num_events, packed, frames.sample()))
        self._num_bytes += len(packed)
        if len(self._frames) % 2 == 0 and (
            len(self._frames) > MAX_FRAMES or self._num_bytes > _MAX_CONTENT_BYTES
        ):
            self._leave_out_every_other()

    def _leave_out_every_other(self) -> None:
        """Drop every other frame; each remaining frame gets the marks of its predecessor."""
        for gone, kept in zip(self._frames[::2], self._frames[1::2], strict=True):
            marks = [*gone.sample["marks"], *kept.sample["marks"]]
            kept.sample["marks"] = added_up(marks)
        self._frames = self._frames[1::2]
        self._num_bytes = sum(len(kept.content) for kept in self._frames)
        self._every *= 2


class _PageBody(msgspec.Struct, forbid_unknown_fields=True):
    dp_rank: int
    pool: int
    page: int
    frame: int


class _FindBody(msgspec.Struct, forbid_unknown_fields=True):
    input_ids: list[int]
    frame: int
    namespace: str = ""


def view_app(frames: RecordedFrames, name: str) -> Starlette:
    """Return the routes of the memory view over a recording called `name`."""

    async def hello(request: Request) -> Response:
        return json_response(
            ViewFacts(
                model=name,
                version=metadata.version("sgl-jax"),
                dp_size=frames.dp_size,
                page_size=frames.page_size,
                samples=frames.samples,
                is_recording=True,
                num_frames=len(frames),
            )
        )

    async def frame(request: Request) -> Response:
        number = request.query_params.get("number", "")
        if not number.isdecimal() or len(number) > _MAX_DIGITS:
            raise InvalidRequestError(f"number must be a frame's, got {number!r}", "number")
        return Response(frames.content(int(number)), media_type="application/json")

    async def page(request: Request) -> Response:
        body = _decoded(await request.body(), _PageBody)
        message = DescribePage(dp_rank=body.dp_rank, pool=body.pool, page=body.page)
        return await _read(body.frame, lambda reader: reader.describe_page(message))

    async def find(request: Request) -> Response:
        body = _decoded(await request.body(), _FindBody)
        for token in body.input_ids:
            check_between("input_ids", token, 0, INT32 - 1)
        message = FindPrefix(input_ids=body.input_ids, namespace=body.namespace)
        return await _read(body.frame, lambda reader: reader.find_prefix(message))

    async def _read(number: int, read: Callable[[MemoryReader], Any]) -> Response:
        found = await run_in_threadpool(lambda: read(frames.reader_at(number)))
        return json_response(found)

    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)

    pages = page_routes(MEMORY_PAGE, "/memory", "index.html")
    public = {each.path for each in pages}
    return Starlette(
        middleware=[Middleware(OriginMiddleware, args=ServerArgs(), public=public)],
        routes=[
            *pages,
            Route("/memory/hello", hello),
            Route("/memory/frame", frame),
            Route("/memory/page", page, methods=["POST"]),
            Route("/memory/find", find, methods=["POST"]),
        ],
        exception_handlers={InvalidRequestError: refuse},
    )


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"the body cannot be read: {error}", "body") from error


def show(path: Path, port: int) -> None:
    """Serve the view of a recording on localhost only, until interrupted. Port 0: any free port.
    Raises `RecordingError` for an invalid recording, OSError if file or port cannot be used."""
    frames = RecordedFrames(path)
    if frames.difference:
        print(f"the view ends where the scheduler differs: {frames.difference}")
    listener = socket.create_server(("127.0.0.1", port))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/memory"
    print(f"{len(frames)} frames of {path.name}: open {url} (Ctrl-C ends)", flush=True)
    config = uvicorn.Config(view_app(frames, path.name), log_level="error", lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
