"""What the scheduler is told and what it answers, as values that can be written to a file.

One struct for each event, tagged by its class name. Arrays travel as (dtype, shape, bytes).
"""

from dataclasses import fields
from typing import Any, TypeAlias

import msgspec
import numpy as np

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import (
    AbortRequest,
    GenerateRequest,
    OutputBatch,
    Reply,
    RequestOutput,
    SessionMessage,
    StopRequest,
    TokenLogprobs,
)
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.server_args import SchedulerArgs
from sgl_jax.core.step_plan import (
    PromptLogprobs,
    RankPlan,
    RankResult,
    RowAdmission,
    StepPlan,
)


class Started(msgspec.Struct, frozen=True, tag=True):
    """The first event: how the scheduler was made."""

    sizes: EngineSizes
    args: SchedulerArgs
    max_passed_over: int


class Submitted(msgspec.Struct, frozen=True, tag=True):
    message: GenerateRequest


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: GenerateRequest
    text: str
    status_code: int


class Aborted(msgspec.Struct, frozen=True, tag=True):
    message: AbortRequest


class Stopped(msgspec.Struct, frozen=True, tag=True):
    message: StopRequest


class AskedSession(msgspec.Struct, frozen=True, tag=True):
    """A client asked about sessions."""

    message: SessionMessage


class AnsweredSession(msgspec.Struct, frozen=True, tag=True):
    """What `session` answered to the event before this."""

    reply: Reply


class Flushed(msgspec.Struct, frozen=True, tag=True):
    pass


class FailedAll(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Rebuilt(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Ticked(msgspec.Struct, frozen=True, tag=True):
    now_s: float


class Planned(msgspec.Struct, frozen=True, tag=True):
    """What `plan` answered."""

    plan: StepPlan | None


class ResultRead(msgspec.Struct, frozen=True, tag=True):
    step_id: int
    results: tuple[RankResult, ...]


class TookOutputs(msgspec.Struct, frozen=True, tag=True):
    """What `take_outputs` answered; not recorded when there was nothing."""

    outputs: OutputBatch


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The event before this raised."""

    error: str


class Noted(msgspec.Struct, frozen=True, tag=True):
    """Nothing the scheduler was told, but something a reader of the recording should know."""

    text: str


Event: TypeAlias = (
    Started
    | Submitted
    | Refused
    | Aborted
    | Stopped
    | AskedSession
    | AnsweredSession
    | Flushed
    | FailedAll
    | Rebuilt
    | Ticked
    | Planned
    | ResultRead
    | TookOutputs
    | Raised
    | Noted
)


# These are recorded by position: a file is only read by code with the same fields.
_TUPLES = (
    *(EngineSizes, RowAdmission, RankPlan, PageChanges),
    *(PromptLogprobs, RankResult),
)
_STRUCTS = (RequestOutput, TokenLogprobs)
LAYOUT = "; ".join(
    [f"SchedulerArgs: {' '.join(field.name for field in fields(SchedulerArgs))}"]
    + [f"{kind.__name__}: {' '.join(kind._fields)}" for kind in _TUPLES]
    + [f"{kind.__name__}: {' '.join(kind.__struct_fields__)}" for kind in _STRUCTS]
)


def make_encoder() -> msgspec.msgpack.Encoder:
    """Encodes events, arrays and all."""
    return msgspec.msgpack.Encoder(enc_hook=_encode_array)


def make_decoder() -> msgspec.msgpack.Decoder[Event]:
    """Decodes what `make_encoder` encoded."""
    return msgspec.msgpack.Decoder(Event, dec_hook=_decode_array)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"an event holds a {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)
