"""Messages between host 0 and the other hosts of an engine. Must not import jax.

Host 0 numbers its commands; every host runs each of them, in order, on its own devices.
"""

from typing import Any, TypeAlias

import msgspec

from sgl_jax.core.engine_messages import HostFigures
from sgl_jax.core.step_plan import Int32Array, StepPlan
from sgl_jax.core.transfers import Transfers


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Launch a step. Page tables are in it as differences, so a decode step is some kilobytes."""

    plan: StepPlan


class MovePages(msgspec.Struct, frozen=True, tag=True):
    """Begin transfers between the devices and each host's memory."""

    transfers: Transfers


class RankMasks(msgspec.Struct, frozen=True):
    """The masks of one rank's rows that have a grammar; all others allow every token."""

    num_rows: int
    rows: Int32Array  # [n] indices in the rank's plan
    masks: Int32Array  # [n, 1 + max_draft_tokens, words]


class Draw(msgspec.Struct, frozen=True, tag=True):
    """Draw the tokens of the masked step that was launched last."""

    ranks: list[RankMasks]


class CallExecutor(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the executor, by its name in `hosts.follower`."""

    name: str
    args: list[Any] = []


class End(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended as it should; the hosts end, too."""


Command: TypeAlias = Launch | MovePages | Draw | CallExecutor | End


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A host's first message: its place, and its facts by name (`hosts.description`)."""

    rank: int
    facts: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All hosts are there, and agree."""


class NoGroup(msgspec.Struct, frozen=True, tag=True):
    """The group does not come about."""

    reason: str


class LeaderBeat(msgspec.Struct, frozen=True, tag=True):
    """Host 0 lives, and has sent so many commands."""

    num_commands: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Host 0 ends the group, since a host was lost."""

    reason: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A host lives. `background_end` as `ModelExecutor.background_end` returns it."""

    rank: int
    figures: HostFigures
    progress: str = ""  # of loading or compiling, for host 0's log
    background_end: str | None = None


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """A host has got a signal to end: the engine finishes its requests, and all hosts end."""

    rank: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A host has left the devices' group, after `End`."""

    rank: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A host cannot go on."""

    rank: int
    reason: str


ToFollower: TypeAlias = Command | Welcome | NoGroup | LeaderBeat | Lost
ToLeader: TypeAlias = Hello | Beat | Leaving | Ended | Failed
