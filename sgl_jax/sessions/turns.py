"""A turn's tokens put behind a history, and the name of the turn."""

import msgspec
import numpy as np

from sgl_jax.core.messages import GenerateRequest, SessionTurn
from sgl_jax.core.step_plan import Int32Array

NO_TOKENS: Int32Array = np.zeros(0, np.int32)
NO_TOKENS.flags.writeable = False


def append_turn(history: Int32Array, input_ids: list[int], turn: SessionTurn) -> Int32Array:
    """`history` and the turn's tokens, int32; without a leading BOS where it would be a second."""
    new = np.array(input_ids, np.int32)
    if len(history) and len(new) and turn.bos_token_id is not None and new[0] == turn.bos_token_id:
        new = new[1:]
    return np.concatenate([history, new])


def named_turn(message: GenerateRequest) -> SessionTurn:
    """The turn that a request is, with the name that it has in its session."""
    assert message.session is not None
    name = message.session.name or message.rid
    return msgspec.structs.replace(message.session, name=name)


def turn_name(turn: SessionTurn) -> str:
    """The name of a `named_turn`."""
    assert turn.name is not None
    return turn.name
