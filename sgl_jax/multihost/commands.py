"""Messages between host 0 and the other hosts of an engine. Must not import jax.

Host 0 numbers its commands. Every host runs each of them, in order, on its devices.
"""

from typing import Any, TypeAlias

import msgspec

from sgl_jax.core.engine_messages import HostFigures
from sgl_jax.core.step_plan import Int32Array, StepPlan
from sgl_jax.core.transfers import Transfers


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Launch a step. Page tables are sent as differences, so a decode step takes some kilobytes."""

    plan: StepPlan


class MovePages(msgspec.Struct, frozen=True, tag=True):
    """Begin transfers between the devices and each host's memory."""

    transfers: Transfers


class RankMasks(msgspec.Struct, frozen=True):
    """The masks of one rank's rows with a grammar; all other rows allow every token."""

    num_rows: int
    rows: Int32Array  # [n] indices in the rank's plan
    masks: Int32Array  # [n, 1 + max_draft_tokens, words]


class Draw(msgspec.Struct, frozen=True, tag=True):
    """Sample the tokens of the masked step launched last."""

    ranks: list[RankMasks]


class CallExecutor(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the executor, by its name in `hosts.worker`."""

    name: str
    args: list[Any] = []


class End(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended normally; the hosts end, too."""


Command: TypeAlias = Launch | MovePages | Draw | CallExecutor | End


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A host's first message: its rank, and its facts by name (`hosts.description`)."""

    rank: int
    facts: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All hosts have joined and agree."""


class JoinRefused(msgspec.Struct, frozen=True, tag=True):
    """The group cannot be formed."""

    reason: str


class CoordinatorHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of host 0, with the number of commands sent so far."""

    num_commands: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Host 0 ends the group because a host was lost."""

    reason: str


class WorkerHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of a host. `background_end` is the result of `ModelExecutor.background_end`."""

    rank: int
    figures: HostFigures
    progress: str = ""  # of loading or compiling, for host 0's log
    background_end: str | None = None


class StopRequested(msgspec.Struct, frozen=True, tag=True):
    """A host has received a signal to end: the engine finishes its requests, and all hosts end."""

    rank: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A host has left the devices' group, after `End`."""

    rank: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A host cannot continue."""

    rank: int
    reason: str


ToWorker: TypeAlias = Command | Welcome | JoinRefused | CoordinatorHeartbeat | Lost
ToCoordinator: TypeAlias = Hello | WorkerHeartbeat | StopRequested | Ended | Failed
