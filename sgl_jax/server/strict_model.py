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
from sgl_jax.server.unserved_fields import Fields

T = TypeVar("T")

Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID_CHARS)]
User = Annotated[str, Field(max_length=MAX_USER_CHARS)]
Priority = Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
# One for each prompt.
ForEach = Annotated[list[T], Field(fail_fast=True, max_length=MAX_REQUESTS_PER_CALL)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


def _describe_unserved(schema: dict[str, Any], model: type["StrictModel"]) -> None:
    properties = schema.setdefault("properties", {})
    properties.update({name: field.schema for name, field in model.unserved.items()})


class StrictModel(BaseModel):
    """No coercion, no unknown fields, no NaN; a null counts as not given.

    `unserved` are the fields that are known, and taken only where they ask for nothing.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        frozen=True,
        json_schema_extra=_describe_unserved,
    )
    unserved: ClassVar[Fields] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_unserved(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:  # or each unknown one would become an error of its own
            raise ValueError(f"at most {MAX_FIELDS} fields, got {len(body)}")
        for name in body.keys() & cls.unserved.keys():
            cls.unserved[name].check(body[name])
        return {
            name: value
            for name, value in body.items()
            if value is not None and name not in cls.unserved
        }
