"""Messages to the engine that bring new weights, and that release or allocate device memory."""

from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen, doc

from sgl_jax.core import calls
from sgl_jax.core.calls import WithReply, call
from sgl_jax.core.request_limits import MAX_PATH_CHARS

MAX_VERSION_CHARS = 256

UpdateMode = Literal["staged", "chunked"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]


@call(
    "from_disk",
    calls.WeightsUpdated,
    "/update_weights_from_disk",
    is_admin=True,
    timeout_s=3600.0,
)
class UpdateWeightsFromDisk(WithReply, frozen=True, kw_only=True, tag=True):
    """Load the weights of another folder of the same model. Running requests recompute their KV and
    continue after the same tokens. If loading fails, the old weights stay."""

    model_path: Annotated[
        str, MinLen(1), MaxLen(MAX_PATH_CHARS), doc("folder on the server's machine")
    ]
    keep_cache: Annotated[
        bool,
        doc(
            "requests that decode keep their KV of the old weights, and their answers say so; no "
            "other request uses it"
        ),
    ] = False
    flush_cache: Annotated[
        bool, doc("no effect: caches of the old weights are never used with the new")
    ] = True
    load_format: Annotated[Literal["auto"], doc("no effect: the folder's files tell it")] = "auto"
    weight_version: Annotated[
        Annotated[str, MaxLen(MAX_VERSION_CHARS)] | None,
        doc("label of the new weights, in answers; default: `model_path`"),
    ] = None
    abort_all_requests: Annotated[bool, doc("end all requests first")] = False


@call("relabel", calls.VersionUpdated, "/update_weight_version", is_admin=True)
class UpdateWeightVersion(WithReply, frozen=True, kw_only=True, tag=True):
    """Give the served weights another label. Requests that are not aborted go on."""

    new_version: Annotated[str, MaxLen(MAX_VERSION_CHARS), doc("label in answers")]
    abort_all_requests: Annotated[bool, doc("end all requests first")] = True


@call("from_tensors", calls.WeightsUpdated, is_admin=True, timeout_s=3600.0)
class UpdateWeightsFromTensor(WithReply, frozen=True, kw_only=True, tag=True):
    """Take tensors of new weights, which are served once all have arrived.

    Args:
        tensors: the bytes of a safetensors file; within one process, arrays by name.
        weight_version: a label of the new weights. Tensors of another version than the last start a
            new update.
        mode: `staged`: the old weights serve until the new weights are complete; `chunked`: each
            parameter replaces the old at once, and no step runs until all are replaced.
        is_first: drop the tensors of an update that has not ended.
        is_last: True refuses an incomplete update, False awaits more tensors even if it is
            complete.
        keep_cache, abort_all_requests: as in `UpdateWeightsFromDisk`.
    """

    tensors: Any
    weight_version: str = ""
    mode: UpdateMode = "staged"
    is_first: bool = False
    is_last: bool | None = None
    keep_cache: bool = False
    abort_all_requests: bool = False


_Tags = Annotated[
    list[MemoryTag] | None, doc("`weights`, `kv_cache`; default: both; `cuda_graph`: no effect")
]


@call("release", calls.Done, "/release_memory_occupation", is_admin=True, timeout_s=120.0)
class ReleaseMemory(WithReply, frozen=True, kw_only=True, tag=True):
    """Delete the weights or the KV pools on the devices. Running requests wait, without memory."""

    tags: _Tags = None


@call("resume", calls.Done, "/resume_memory_occupation", is_admin=True, timeout_s=120.0)
class ResumeMemory(WithReply, frozen=True, kw_only=True, tag=True):
    """Allocate the KV pools again, or await weights. Requests run once an update has brought
    weights, unless generation was paused."""

    tags: _Tags = None


WeightMessage = (
    UpdateWeightsFromDisk
    | UpdateWeightsFromTensor
    | UpdateWeightVersion
    | ReleaseMemory
    | ResumeMemory
)
