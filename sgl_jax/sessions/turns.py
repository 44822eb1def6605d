"""The prompt and the name of a session's turn."""

from typing import NamedTuple

import numpy as np

from sgl_jax.core.messages import GenerateRequest, SessionTurn
from sgl_jax.core.step_plan import Int32Array

NO_TOKENS: Int32Array = np.zeros(0, np.int32)
NO_TOKENS.flags.writeable = False


class TurnOutline(NamedTuple):
    """A finished turn for display. `parent` is the list index of the turn it continues."""

    name: str
    num_tokens: int  # history, prompt and output
    parent: int | None


def turn_of(message: GenerateRequest) -> SessionTurn:
    assert message.session is not None
    return message.session


def turn_name(message: GenerateRequest) -> str:
    return turn_of(message).name or message.rid


def append_turn(history: Int32Array, message: GenerateRequest) -> Int32Array:
    """Return `history` plus the turn's tokens, int32; after a history, without their BOS token."""
    bos, new = turn_of(message).bos_token_id, np.array(message.input_ids, np.int32)
    if len(history) and len(new) and bos is not None and new[0] == bos:
        new = new[1:]
    return np.concatenate([history, new])
