"""Messages to the engine that start and end device traces and records of experts."""

from typing import Annotated

from annotated_types import Ge, Lt, MaxLen, MinLen, doc

from sgl_jax.core import calls
from sgl_jax.core.calls import WithReply, call
from sgl_jax.core.request_limits import INT32, MAX_PATH_CHARS


@call("start_profile", calls.Traced, "/start_profile", is_admin=True, timeout_s=120.0)
class StartProfile(WithReply, frozen=True, kw_only=True, tag=True):
    """Start a device trace for TensorBoard or xprof."""

    num_steps: Annotated[
        Annotated[int, Ge(1), Lt(INT32)] | None,
        doc("number of steps to trace; default: until `/stop_profile`"),
    ] = None

    output_dir: Annotated[
        Annotated[str, MinLen(1), MaxLen(MAX_PATH_CHARS)] | None,
        doc("default: a new temporary folder"),
    ] = None


@call("stop_profile", calls.Traced, "/stop_profile", is_admin=True, timeout_s=120.0)
class StopProfile(WithReply, frozen=True, kw_only=True, tag=True):
    """End the trace and write it."""


@call("start_expert_record", calls.Done, "/start_expert_distribution_record", is_admin=True)
class StartExpertRecord(WithReply, frozen=True, kw_only=True, tag=True):
    """Start counting how often each layer's experts are chosen."""


@call("stop_expert_record", calls.Done, "/stop_expert_distribution_record", is_admin=True)
class StopExpertRecord(WithReply, frozen=True, kw_only=True, tag=True):
    """Stop counting experts."""


@call("dump_expert_record", calls.ExpertRecord, "/dump_expert_distribution_record", is_admin=True)
class DumpExpertRecord(WithReply, frozen=True, kw_only=True, tag=True):
    """Return the current or last record of experts, a file for `--init-expert-location`."""


ProfileMessage = (
    StartProfile | StopProfile | StartExpertRecord | StopExpertRecord | DumpExpertRecord
)
