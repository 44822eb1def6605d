"""The base of every body that clients send: nothing is coerced, nothing unknown is ignored."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sgl_jax.engine.request_limits import (
    MAX_NAMESPACE_CHARS,
    MAX_PRIORITY,
    MAX_RID_CHARS,
    MIN_PRIORITY,
)

Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]
Namespace = Annotated[str, Field(max_length=MAX_NAMESPACE_CHARS)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class StrictModel(BaseModel):
    """No coercion, no unknown fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {k: v for k, v in body.items() if v is not None or k in cls.model_fields}
