"""What the scheduler is told and what it answers, as values that can be written to a file.

One struct for each event, tagged by its class name or by the method that is told it. Arrays travel
as (dtype, shape, bytes).
"""

import re
from dataclasses import fields
from typing import Any, TypeAlias

import msgspec
import numpy as np

from sgl_jax.core.cache_groups import CacheGroup
from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.messages import (
    AbortRequest,
    GenerateRequest,
    OutputBatch,
    PauseMode,
    Reply,
    RequestOutput,
    SessionMessage,
    StopRequest,
    TokenLogprobs,
)
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.server_args import SchedulerArgs
from sgl_jax.core.step_plan import (
    Int32Array,
    PromptLogprobs,
    RankPlan,
    RankResult,
    RowAdmission,
    StatePlan,
    StepPlan,
)
from sgl_jax.scheduler.scheduler import Scheduler


class Started(msgspec.Struct, frozen=True, tag=True):
    """The first event: how the scheduler was made."""

    sizes: EngineSizes
    args: SchedulerArgs
    max_passed_over: int


class Told(msgspec.Struct, frozen=True):
    """Something that a scheduler is told: the tag of each kind names the method of `Scheduler`,
    and its fields are the arguments."""

    def tell(self, scheduler: Scheduler) -> Any:
        """Tell it; answers what it answers."""
        return getattr(scheduler, str(self.__struct_config__.tag))(*msgspec.structs.astuple(self))


class Submitted(Told, frozen=True, tag="submit"):
    message: GenerateRequest


class Refused(Told, frozen=True, tag="refuse"):
    message: GenerateRequest
    text: str
    status_code: int


class Aborted(Told, frozen=True, tag="abort"):
    message: AbortRequest


class Stopped(Told, frozen=True, tag="stop"):
    message: StopRequest


class Expected(Told, frozen=True, tag="expect"):
    rid: str
    first: int
    tokens: Int32Array


class AwaitedPrograms(Told, frozen=True, tag="await_programs"):
    pass


class ProgramsReady(Told, frozen=True, tag="programs_ready"):
    error: str


class AskedSession(Told, frozen=True, tag="session"):
    message: SessionMessage


class Flushed(Told, frozen=True, tag="flush"):
    pass


class Paused(Told, frozen=True, tag="pause"):
    mode: PauseMode


class Resumed(Told, frozen=True, tag="resume"):
    pass


class RetractedAll(Told, frozen=True, tag="retract_all"):
    pass


class Configured(Told, frozen=True, tag="configure"):
    args: SchedulerArgs
    chunk_tokens: int


class FailedAll(Told, frozen=True, tag="fail_all"):
    reason: str


class Rebuilt(Told, frozen=True, tag="rebuild"):
    reason: str


class Ticked(Told, frozen=True, tag="tick"):
    now_s: float


class AnsweredSession(msgspec.Struct, frozen=True, tag=True):
    """What `session` answered to the event before this."""

    reply: Reply


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
    | Expected
    | AwaitedPrograms
    | ProgramsReady
    | AskedSession
    | AnsweredSession
    | Flushed
    | Paused
    | Resumed
    | Configured
    | RetractedAll
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
    *(EngineSizes, CacheGroup, RowAdmission, RankPlan, StatePlan, PageChanges),
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
    # Of other texts numpy makes what it can, by parsing them as Python.
    if not re.fullmatch("[<|][biuf][1248]", dtype):
        raise ValueError(f"an array of an unknown dtype, {dtype!r}")
    return np.frombuffer(data, dtype).reshape(shape)
