"""What the scheduler is told and what it answers, as values that can be written to a file.

One struct for each event, tagged by its class name. Arrays travel as (dtype, shape, bytes).
"""

import re
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
from sgl_jax.scheduler.scheduler import Scheduler


class Started(msgspec.Struct, frozen=True, tag=True):
    """The first event: how the scheduler was made."""

    sizes: EngineSizes
    args: SchedulerArgs
    max_passed_over: int


class Told(msgspec.Struct, frozen=True, tag=True):
    """Something that a scheduler is told: `tell` does it, and returns the scheduler's answer."""

    def tell(self, scheduler: Scheduler) -> Any:
        raise NotImplementedError


class Submitted(Told, frozen=True):
    message: GenerateRequest

    def tell(self, scheduler: Scheduler) -> None:
        scheduler.submit(self.message)


class Refused(Told, frozen=True):
    message: GenerateRequest
    text: str
    status_code: int

    def tell(self, scheduler: Scheduler) -> None:
        scheduler.refuse(self.message, self.text, self.status_code)


class Aborted(Told, frozen=True):
    message: AbortRequest

    def tell(self, scheduler: Scheduler) -> None:
        scheduler.abort(self.message)


class Stopped(Told, frozen=True):
    message: StopRequest

    def tell(self, scheduler: Scheduler) -> None:
        scheduler.stop(self.message)


class AskedSession(Told, frozen=True):
    """A client asked about sessions."""

    message: SessionMessage

    def tell(self, scheduler: Scheduler) -> Reply:
        return scheduler.session(self.message)


class Flushed(Told, frozen=True):
    def tell(self, scheduler: Scheduler) -> bool:
        return scheduler.flush()


class FailedAll(Told, frozen=True):
    reason: str

    def tell(self, scheduler: Scheduler) -> None:
        scheduler.fail_all(self.reason)


class Rebuilt(Told, frozen=True):
    reason: str

    def tell(self, scheduler: Scheduler) -> None:
        scheduler.rebuild(self.reason)


class Ticked(Told, frozen=True):
    now_s: float

    def tell(self, scheduler: Scheduler) -> None:
        scheduler.tick(self.now_s)


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
    # Of other texts numpy makes what it can, by parsing them as Python.
    if not re.fullmatch("[<|][biuf][1248]", dtype):
        raise ValueError(f"an array of an unknown dtype, {dtype!r}")
    return np.frombuffer(data, dtype).reshape(shape)
