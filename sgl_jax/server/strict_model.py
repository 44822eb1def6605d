"""The base of every body that clients send: nothing is coerced, nothing unknown is ignored."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sgl_jax.core.sampling_params import MAX_LOGIT_BIAS
from sgl_jax.engine.request_limits import (
    MAX_NAMESPACE_CHARS,
    MAX_PRIORITY,
    MAX_RID_CHARS,
    MIN_PRIORITY,
)
from sgl_jax.server.limits import MAX_FIELDS, MAX_PROMPTS

T = TypeVar("T")


def _check_biases(given: Any) -> Any:
    """Before each of them is looked at."""
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} entries in logit_bias, got {len(given)}")
    return given


Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]
Namespace = Annotated[str, Field(max_length=MAX_NAMESPACE_CHARS)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_check_biases)
]
# One for each prompt.
ForEach = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class StrictModel(BaseModel):
    """No coercion, no unknown fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:  # or each unknown one would become an error of its own
            raise ValueError(f"at most {MAX_FIELDS} fields, got {len(body)}")
        return {k: v for k, v in body.items() if v is not None or k in cls.model_fields}
