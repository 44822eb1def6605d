"""The base of every body that clients send: nothing is coerced, nothing unknown is ignored."""

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sgl_jax.core.request_limits import (
    MAX_PRIORITY,
    MAX_REQUESTS_PER_CALL,
    MAX_RID_CHARS,
    MAX_USER_CHARS,
    MIN_PRIORITY,
)
from sgl_jax.server.limits import MAX_FIELDS
from sgl_jax.server.unserved_fields import NONE, UnservedFields

T = TypeVar("T")

Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]
User = Annotated[str, Field(max_length=MAX_USER_CHARS)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
# One for each prompt.
ForEach = Annotated[list[T], Field(fail_fast=True, max_length=MAX_REQUESTS_PER_CALL)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


def _describe_unserved(schema: dict[str, Any], model: type["StrictModel"]) -> None:
    properties = schema.setdefault("properties", {})
    schemas = model.unserved.schemas().items()
    properties |= {name: schema for name, schema in schemas if name not in model.model_fields}


class StrictModel(BaseModel):
    """No coercion, no unknown fields, no NaN; a null counts as not given.

    `unserved` fields are accepted only where they request nothing.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        frozen=True,
        json_schema_extra=_describe_unserved,
    )
    unserved: ClassVar[UnservedFields] = NONE

    @model_validator(mode="before")
    @classmethod
    def _drop_unserved(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:  # or each unknown one would become an error of its own
            raise ValueError(f"at most {MAX_FIELDS} fields, got {len(body)}")
        unserved = {n for n in body if n in cls.unserved and n not in cls.model_fields}
        for name in unserved:
            cls.unserved.check(name, body[name])
        return {n: value for n, value in body.items() if value is not None and n not in unserved}
