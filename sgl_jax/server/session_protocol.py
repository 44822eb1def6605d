"""How a request says which session it continues: SGLang's words."""

from pydantic import Field

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import SessionId, SessionTurn
from sgl_jax.core.request_limits import INT32
from sgl_jax.server.strict_model import Rid, StrictModel


class SessionParams(StrictModel):
    """`session_params`: the session that a request is a turn of, and how it continues it."""

    id: SessionId
    rid: Rid | None = Field(default=None, description="the turn to append to; null starts anew")
    offset: int | None = Field(
        default=None, ge=-INT32, lt=INT32, description="tokens of the history to keep; 0: all"
    )
    replace: bool | None = Field(default=None, description="drop what followed `rid`")
    drop_previous_output: bool | None = Field(
        default=None, description="append to the prompt of `rid`, not to its output"
    )


def session_turn(params: SessionParams | None) -> SessionTurn | None:
    """As the engine takes it."""
    return None if params is None else SessionTurn(**params.model_dump(exclude_none=True))


def refuse_several(count: int, field: str) -> None:
    """A turn is one request: raise `InvalidRequestError` if `field` asks for several."""
    if count != 1:
        raise InvalidRequestError(
            f"a session takes one request at a time, {field} asks for {count}", field
        )
