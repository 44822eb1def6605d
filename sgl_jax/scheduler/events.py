"""Events that a scheduler handles, and records of its decisions, in the form of a recording.

Requests and calls about sessions are recorded unchanged. Every other event is a struct tagged by
its class name. `core.array_codec` encodes arrays.
"""

from dataclasses import fields
from typing import TypeAlias

import msgspec

from sgl_jax.core.engine_messages import (
    FinishReason,
    OutputBatch,
    Reply,
    RequestOutput,
    TokenLogprobs,
)
from sgl_jax.core.engine_sizes import CacheGroup, EngineSizes
from sgl_jax.core.messages import (
    AbortRequest,
    GenerateRequest,
    PauseMode,
    SessionMessage,
    StopRequest,
)
from sgl_jax.core.page_tables import PageChanges
from sgl_jax.core.scheduler_args import SchedulerArgs
from sgl_jax.core.step_plan import (
    Int32Array,
    PageTransfer,
    PromptLogprobs,
    RankPlan,
    RankResult,
    RowAdmission,
    StatePlan,
    StepPlan,
)
from sgl_jax.core.transfers import StoreTransfer, TransferEnd, Transfers
from sgl_jax.mem_cache.offload.saved_prefixes import SavedPrefix
from sgl_jax.sessions.images import KnownImage
from sgl_jax.sessions.saving import SavedSession
from sgl_jax.sessions.streaming import EndedTurn
from sgl_jax.sessions.tree import SavedNode


class Expect(msgspec.Struct, frozen=True, tag=True):
    """A grammar forces `tokens` int32[n] of a request from position `first` on."""

    rid: str
    first: int
    tokens: Int32Array


class AwaitPrograms(msgspec.Struct, frozen=True, tag=True):
    """The programs of masked steps are being compiled: requests that need them wait."""


class ProgramsReady(msgspec.Struct, frozen=True, tag=True):
    """These programs are compiled; with an `error`, requests that need them end with it."""

    error: str


class GrammarReady(msgspec.Struct, frozen=True, tag=True):
    """The grammar of a request is compiled; if there is a `refusal`, the request ends with it.

    Every request with a grammar waits for this. It has no effect on an ended request.
    """

    rid: str
    refusal: FinishReason | None = None


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Empty all prefix caches. While requests run or prefixes are on their way to the store,
    nothing changes and the decision is False."""


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Plan no step until `Resume`. By mode, running requests keep their memory, are retracted, or
    end with all waiting requests."""

    mode: PauseMode


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Plan steps again."""


class RetractAll(msgspec.Struct, frozen=True, tag=True):
    """Retract every running request; it keeps its tokens and waits to run again."""


class NewWeights(msgspec.Struct, frozen=True, tag=True):
    """The next step has other weights: no request that starts from now on uses KV of the weights
    before. Every running request is retracted, or if `keeps_running`, those that decode go on with
    their KV, which no other request uses. The decision is the rids of these."""

    keeps_running: bool


class Configure(msgspec.Struct, frozen=True, tag=True):
    """Change settings from the next step on: order, balance, deadlines, the threshold of
    preemption, and the prompt tokens of a step on a rank, no more than the sizes allow."""

    args: SchedulerArgs
    chunk_tokens: int


class FailAll(msgspec.Struct, frozen=True, tag=True):
    """The device lost its state: end every request, and keep no cached page."""

    reason: str


class Rebuild(msgspec.Struct, frozen=True, tag=True):
    """The memory's records are wrong: end every request, reset all memory, check it is empty.

    Nothing is released one by one, since a release would read these records. No launched step may
    still run on the device.
    """

    reason: str


class Tick(msgspec.Struct, frozen=True, tag=True):
    """The time, in seconds from any origin: requests and sessions past their limits end.

    Needed only now and then (`Scheduler.needs_tick`), and before all events that depend on the
    time: a request arrives at the time of the last tick, a session is used at the time of the next.
    """

    now_s: float


class RestoreCache(msgspec.Struct, frozen=True, tag=True):
    """Open saved sessions, and load saved prefixes from the store, first to last, while requests
    are served. The decision is the number of sessions that could not be opened."""

    sessions: list[SavedSession]
    prefixes: list[SavedPrefix]
    images: list[KnownImage] = []  # of the sessions' histories

    def without_pixels(self) -> "RestoreCache":
        """Return the event as it is recorded."""
        images = [
            each._replace(image=msgspec.structs.replace(each.image, pixels=b""))
            for each in self.images
        ]
        return msgspec.structs.replace(self, images=images)


class TakeTransfers(msgspec.Struct, frozen=True, tag=True):
    """Return the `Transfers` to begin before the next step is planned.

    Every step planned before must have been launched.
    """


class TransferEnded(msgspec.Struct, frozen=True, tag=True):
    """A transfer has ended. It is ignored if it began before `FailAll` or `Rebuild`."""

    end: TransferEnd


class StoreOverdue(msgspec.Struct, frozen=True, tag=True):
    """A lookup or load has taken too long: its request starts without it. The transfer may still
    end, and its blocks are kept."""

    dp_rank: int
    number: int


class StoreSuspended(msgspec.Struct, frozen=True, tag=True):
    """A call of the store failed or took too long: lookups, loads and writes stop. Each failed
    probe repeats the event. With `answers`, a probe succeeded: the store is in use again."""

    answers: bool


class PrefillRate(msgspec.Struct, frozen=True, tag=True):
    """The measured number of prompt tokens that a rank computes per second. It is the price of not
    loading a prefix from the host or the store."""

    tokens_per_s: float


class FetchRate(msgspec.Struct, frozen=True, tag=True):
    """The tokens per second that a rank fetches from host memory, measured at the start. Later
    fetches report their time (`TransferEnded`)."""

    tokens_per_s: float


class StoreRate(msgspec.Struct, frozen=True, tag=True):
    """The tokens per second that a rank loads from the store, measured at the start. Later loads
    report their time (`TransferEnded`)."""

    tokens_per_s: float


class DecodeSteps(msgspec.Struct, frozen=True, tag=True):
    """From the next plan on, a plan of decode rows has up to `num_steps` steps while no request
    waits: at most `EngineSizes.max_decode_steps`. The programs of such plans are compiled."""

    num_steps: int


class PlanStep(msgspec.Struct, frozen=True, tag=True):
    """Plan the next step. The decision is a `StepPlan`, with its memory taken and its lengths
    committed, or None if nothing can run. The caller must launch the step, or send `FailAll`."""


class ResultRead(msgspec.Struct, frozen=True, tag=True):
    """The result of a launched step was read. Results are read in launch order. After `FailAll` or
    `Rebuild`, results of earlier steps are dropped."""

    step_id: int
    results: tuple[RankResult, ...]


class TakeOutputs(msgspec.Struct, frozen=True, tag=True):
    """Return the `OutputBatch` that requests gained since the last call, or None."""


OffloadEvent: TypeAlias = (
    TransferEnded | StoreOverdue | StoreSuspended | PrefillRate | FetchRate | StoreRate
)

Event: TypeAlias = (
    GenerateRequest
    | AbortRequest
    | StopRequest
    | SessionMessage
    | Expect
    | AwaitPrograms
    | ProgramsReady
    | GrammarReady
    | Flush
    | Pause
    | Resume
    | RetractAll
    | NewWeights
    | Configure
    | FailAll
    | Rebuild
    | Tick
    | RestoreCache
    | TakeTransfers
    | OffloadEvent
    | DecodeSteps
    | PlanStep
    | ResultRead
    | TakeOutputs
)


class Started(msgspec.Struct, frozen=True, tag=True):
    """The first record: the arguments of the scheduler."""

    sizes: EngineSizes
    args: SchedulerArgs
    max_skip_count: int = msgspec.field(name="max_passed_over")  # its name in recordings


class SessionReply(msgspec.Struct, frozen=True, tag=True):
    """The reply to the session message before this."""

    reply: Reply


class Planned(msgspec.Struct, frozen=True, tag=True):
    """The plan made for the `PlanStep` before this."""

    plan: StepPlan | None


class TransfersTaken(msgspec.Struct, frozen=True, tag=True):
    """The transfers returned to the `TakeTransfers` before this."""

    transfers: Transfers


class OutputsTaken(msgspec.Struct, frozen=True, tag=True):
    """The outputs returned to the `TakeOutputs` before this."""

    outputs: OutputBatch | None


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The event before this raised."""

    error: str


class Note(msgspec.Struct, frozen=True, tag=True):
    """A text for the reader of the recording; not an event."""

    text: str


Decision: TypeAlias = SessionReply | Planned | TransfersTaken | OutputsTaken | Raised
Record: TypeAlias = Event | Decision | Started | Note


# These are recorded by position: only code with the same fields can read a file.
_TUPLES = (
    *(EngineSizes, CacheGroup, RowAdmission, RankPlan, StatePlan, PageChanges),
    *(PromptLogprobs, RankResult, PageTransfer, StoreTransfer),
    *(Transfers, TransferEnd, SavedPrefix, SavedNode, EndedTurn),
)
_STRUCTS = (OutputBatch, RequestOutput, TokenLogprobs)
LAYOUT = "; ".join(
    [f"SchedulerArgs: {' '.join(field.name for field in fields(SchedulerArgs))}"]
    + [f"{kind.__name__}: {' '.join(kind._fields)}" for kind in _TUPLES]
    + [f"{kind.__name__}: {' '.join(kind.__struct_fields__)}" for kind in _STRUCTS]
)
