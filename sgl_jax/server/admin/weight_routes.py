"""Routes of weights that trainers send: tensors in a body, and the ways that are refused."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from sgl_jax.core.calls import WeightsUpdated
from sgl_jax.core.messages import CALL_OF
from sgl_jax.core.weight_messages import MAX_VERSION_CHARS, UpdateMode, UpdateWeightsFromTensor
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import json_response
from sgl_jax.server.engine_calls import call_engine, refused
from sgl_jax.server.errors import ApiError
from sgl_jax.server.guards.keys import UPDATE_PATHS, WEIGHT_PATHS
from sgl_jax.server.references import references_of

router = APIRouter(tags=["management"])
_REFUSED = (
    "weights do not come over a group of processes: send them in bodies to "
    "/update_weights_from_tensor, write a folder for /update_weights_from_disk, or call "
    "Engine.update_weights in one process"
)


class TensorFields(BaseModel):
    """Fields in the URL of `/update_weights_from_tensor`."""

    model_config = ConfigDict(extra="forbid")

    weight_version: str = Field("", max_length=MAX_VERSION_CHARS, description="label in answers")
    mode: UpdateMode = "staged"
    is_first: bool = False
    is_last: bool | None = None
    keep_cache: bool = False
    flush_cache: bool = Field(True, description="without effect: see keep_cache")
    abort_all_requests: bool = False


@router.post(WEIGHT_PATHS[0], responses=answers(WeightsUpdated))
async def update_weights_from_tensor(
    request: Request, fields: Annotated[TensorFields, Query()]
) -> Response:
    """Take tensors of new weights: the body is a safetensors file, with the names of a checkpoint.

    `name#100` are the rows of a tensor from 100 on. The weights are served once all have arrived,
    in any number of calls.
    """
    if request.headers.get("content-type", "").partition(";")[0].endswith("json"):
        raise ApiError(
            400,
            "send the bytes of a safetensors file, with application/octet-stream, and the other "
            "fields in the URL: pickled tensors in JSON are not read",
            code="not_safetensors",
        )
    message = UpdateWeightsFromTensor(
        tensors=await request.body(), **fields.model_dump(exclude={"flush_cache"})
    )
    refs = references_of(request)
    timeout_s = CALL_OF[UpdateWeightsFromTensor].timeout_s
    refs.num_missing = None
    reply = await call_engine(refs, message, timeout_s, is_patient=True)
    if reply.ok:
        refs.num_missing = reply.data.get("num_missing", 0)
        return json_response(reply.data)
    refs.frontend.check_alive()
    raise refused(reply, reply.message)


async def refuse_group(request: Request) -> Response:
    """Refuse an update over a group of processes, with the reason."""
    raise ApiError(400, _REFUSED, code="not_supported")


for _path in WEIGHT_PATHS[1:]:
    router.add_api_route(_path, refuse_group, methods=["POST"], responses=answers())


@router.post(UPDATE_PATHS[0], responses=answers(WeightsUpdated))
async def begin_weight_update(request: Request) -> Response:
    """Note that an update begins. Steps go on."""
    refs = references_of(request)
    refs.changes_at_begin, refs.num_missing = refs.frontend.num_weight_changes, None
    return json_response(WeightsUpdated(True, "an update has begun", 0))


@router.post(UPDATE_PATHS[1], responses=answers(WeightsUpdated))
async def end_weight_update(request: Request) -> Response:
    """Confirm that new weights are served since `/begin_weight_update`. Complete weights are served
    at once, unless they came with `is_last=false`."""
    refs = references_of(request)
    begin = refs.changes_at_begin
    if begin is None:
        raise ApiError(400, "no update has begun: call /begin_weight_update", code="no_update")
    if refs.frontend.num_weight_changes == begin:
        match refs.num_missing:
            case None:
                why = "no tensors have arrived, or the last were refused"
            case 0:
                why = "all tensors have arrived, with is_last=false"
            case missing:
                why = f"{missing} tensors are missing"
        raise ApiError(400, f"no new weights are served: {why}", code="no_update")
    refs.changes_at_begin = None
    version = refs.frontend.weight_version
    return json_response(WeightsUpdated(True, f"serving the weights {version!r}", 0))
