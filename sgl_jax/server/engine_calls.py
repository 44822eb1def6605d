"""Calls to the engine, each with a timeout.

A call is cancelled when no one waits for it any longer, so that a 503 remains true.
"""

import asyncio

from sgl_jax.core.engine_messages import Reply
from sgl_jax.core.messages import CALL_OF, CallMessage, PauseGeneration
from sgl_jax.server.errors import ApiError
from sgl_jax.server.references import References

# Timeout while the engine loads weights or compiles, equal to `/update_weights_from_disk`'s.
_LONG_TIMEOUT_S = 3600.0
_LOOK_INTERVAL_S = 1.0  # between checks of that


def refused(reply: Reply, message: str) -> ApiError:
    """Return the error for a call refused by the engine; `message` is the reason for the caller."""
    data = reply.data
    return ApiError(
        data.get("status_code", 400), message, param=data.get("param"), code=data.get("code")
    )


async def call_engine(
    refs: References,
    message: CallMessage,
    timeout_s: float | None = None,
    *,
    is_patient: bool = False,
) -> Reply:
    """Send a call to the engine and wait for its reply.

    The call is cancelled if this coroutine times out or is cancelled.

    Args:
        timeout_s: seconds to wait; None: `answer_timeout_s`.
        is_patient: wait longer while the engine loads weights or compiles.

    Raises:
        ApiError: 503, no reply in time. The message describes the fate of the call.
        EngineStuckError: the engine is stuck, so no reply is expected.
    """
    refs.health.check()
    timeout_s = refs.answer_timeout_s if timeout_s is None else timeout_s
    answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    rid = refs.frontend.call(message, answer.set_result)
    waited_s = 0.0
    try:
        while True:
            wait_s = _LOOK_INTERVAL_S if waited_s else timeout_s
            done, _ = await asyncio.wait([answer], timeout=wait_s)
            waited_s += wait_s
            if done:
                return answer.result()
            if not is_patient or waited_s >= _LONG_TIMEOUT_S or not refs.health.is_in_long_turn:
                break
    finally:
        if not answer.done():
            refs.frontend.cancel_call(rid)
    raise ApiError(
        503,
        f"the engine gave no answer within {waited_s:g} s; the call is cancelled, "
        f"or {_fate(message)}",
        code="call_cancelled",
    )


def _fate(message: CallMessage) -> str:
    if not CALL_OF[type(message)].is_undone:
        return "made nevertheless if it had begun"
    match message:
        case PauseGeneration(mode="abort"):
            return "undone if it had begun, but the requests that it aborted stay ended"
        case PauseGeneration(mode="retract"):
            return "undone if it had begun, and the requests that it retracted are in the queue"
    return "undone if it had begun"
