"""Replies of the engine's loop to calls."""

from typing import Any

import msgspec

from sgl_jax.core.engine_messages import Reply


def answer(message: Any, data: Any) -> Reply:
    """Return the reply to a successful call. A dictionary of builtins as `data` is not copied."""
    builtins = data if isinstance(data, dict) else msgspec.to_builtins(data)
    return Reply(rid=message.rid, ok=True, data=builtins)


def refusal(message: Any, why: str, **data: Any) -> Reply:
    """Return the reply to a refused call, with the reason `why` and `Reply.data` from `data`."""
    return Reply(rid=message.rid, ok=False, message=why, data=data)
