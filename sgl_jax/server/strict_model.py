"""The base of all bodies and their parts. Nothing is coerced, and nothing unknown is ignored."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.server import unserved_fields
from sgl_jax.server.guards.limits import MAX_FIELDS
from sgl_jax.server.unserved_fields import (
    STRICT,
    UnservedFields,
    advice,
    check_unserved,
    without_effect,
)


def _describe_unserved(schema: dict[str, Any], model: type["StrictModel"]) -> None:
    for name, field in model.unserved.items():
        effect = f"without effect: {field.reason}"
        if field.is_refused:
            effect = f"not served: {field.reason}; {advice(name)}"
        schema.setdefault("properties", {}).setdefault(name, {"description": effect})


class StrictModel(BaseModel):
    """No coercion, no unknown fields, no NaN; a null counts as not given.

    `unserved` fields are accepted only with values that request nothing. A validation with the
    context `STRICT` refuses fields without effect: some of `unserved`, and all of `ineffective`.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        frozen=True,
        json_schema_extra=_describe_unserved,
    )
    unserved: ClassVar[UnservedFields] = {}
    ineffective: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_unserved(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:  # otherwise each unknown field would become a separate error
            raise ValueError(f"at most {MAX_FIELDS} fields, got {len(body)}")
        unserved = {n for n in body if n in cls.unserved and n not in cls.model_fields}
        is_strict = info.context == STRICT
        for name in unserved:
            check_unserved(name, body[name], cls.unserved[name], is_strict=is_strict)
        for name in cls.ineffective & body.keys() if is_strict else ():
            if body[name] is not None:
                raise InvalidRequestError(without_effect(name), name)
        return {n: value for n, value in body.items() if value is not None and n not in unserved}


class Part(StrictModel):
    """A message, a part of one, a tool or a group of settings."""

    unserved = unserved_fields.PART
