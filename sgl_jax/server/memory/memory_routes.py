"""Routes of the memory view: its frames, and the search for a prefix.

The page holds no data and needs no key. `/memory/page`, which describes a page, is generated from
its row in the table of calls.
"""

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator
from starlette.types import Receive, Scope, Send

from sgl_jax.core.calls import PrefixFound
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import FindPrefix, Namespace
from sgl_jax.memory_view.frames import ViewFacts
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import BODY, START, json_response
from sgl_jax.server.errors import ApiError
from sgl_jax.server.fields import TokenIds
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.guards.connection import BackpressuredSend, while_connected
from sgl_jax.server.memory.memory_watch import MemoryWatch
from sgl_jax.server.references import references_of
from sgl_jax.server.requests import encode_texts
from sgl_jax.server.shared_reads import reads_of
from sgl_jax.server.strict_model import StrictModel

router = APIRouter(tags=["management"], route_class=JsonRoute)


def watch_of(request: Request) -> MemoryWatch:
    watch = request.app.state.memory_watch
    assert isinstance(watch, MemoryWatch)
    return watch


@router.get("/memory/hello", responses=answers(ViewFacts))
async def hello(request: Request) -> Response:
    """Return facts for the memory view, and its samples of the last ten minutes."""
    refs = references_of(request)
    return json_response(
        ViewFacts(
            model=refs.model_name,
            version=request.app.version,
            dp_size=refs.frontend.facts.dp_size,
            page_size=refs.engine_info["page_size"],
            samples=watch_of(request).samples(),
            shows_text=refs.args.memory_view_text,
        )
    )


@router.get("/memory/events", responses=answers(str, streams=True))
async def events(request: Request) -> Response:
    """Stream the memory of every rank as server-sent events `frame` and `tree`."""
    refs = references_of(request)
    refs.check_open()
    return _Events(watch_of(request), refs.reader_timeout_s)


class FindBody(StrictModel):
    """Body of `/memory/find`: a text or its tokens."""

    text: str | None = None
    input_ids: TokenIds | None = None
    namespace: Namespace = Field(default="", description="as extra_key in /generate")

    @model_validator(mode="after")
    def _one_kind(self) -> "FindBody":
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequestError("send either text or input_ids", "text")
        return self


@router.post("/memory/find", responses=answers(PrefixFound))
async def find(body: FindBody, request: Request) -> Response:
    """Return the longest cached prefix of a text or of tokens, on every rank."""
    ids: Any = body.input_ids
    if body.text is not None:
        (ids,) = await encode_texts(request, [body.text])
    message = FindPrefix(input_ids=list(ids), namespace=body.namespace)
    snapshot = await reads_of(request).read(message)
    return json_response(snapshot.data)


class _Events(Response):
    """The stream of one viewer, for as long as the viewer reads."""

    def __init__(self, watch: MemoryWatch, reader_timeout_s: float) -> None:
        super().__init__()
        self._watch = watch
        self._reader_timeout_s = reader_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        watching = self._watch.events()
        try:
            async with BackpressuredSend(send, self._reader_timeout_s) as patient_send:
                first = await anext(watching, None)
                if first is None:  # raise before the start, so that a refusal is a plain error
                    raise ApiError(503, "the memory view has ended")
                await patient_send(START)
                await patient_send({**BODY, "body": first, "more_body": True})
                async for event in watching:
                    await patient_send({**BODY, "body": event, "more_body": True})
                await patient_send(BODY)
        finally:
            await watching.aclose()
