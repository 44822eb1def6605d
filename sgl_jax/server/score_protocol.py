"""Body and answer of `/v1/score`: how likely tokens are after each of several texts (SGLang's)."""

from typing import Annotated

from msgspec import Struct
from pydantic import Field, model_validator

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.sampling_params import MAX_LOGPROB_IDS
from sgl_jax.server.openai_responses import Usage
from sgl_jax.server.request_fields import RequestFields
from sgl_jax.server.strict_model import ForEach, TokenIds

_LabelIds = Annotated[
    list[Annotated[int, Field(ge=0)]],
    Field(fail_fast=True, min_length=1, max_length=MAX_LOGPROB_IDS),
]


class ScoreBody(RequestFields):
    """A query, and items that it is joined with, all texts or all token ids."""

    query: str | TokenIds
    items: str | ForEach[str] | ForEach[TokenIds]
    label_token_ids: _LabelIds = Field(description="tokens whose probabilities are wanted")
    apply_softmax: bool | None = Field(
        default=None, description="probabilities among these tokens, not among all"
    )
    item_first: bool | None = Field(default=None, description="each item before the query")

    @model_validator(mode="after")
    def _of_one_kind(self) -> "ScoreBody":
        if self.stream:
            raise InvalidRequestError("scores do not come in a stream", "stream")
        if not self.items:
            raise InvalidRequestError("there are no items", "items")
        is_text = isinstance(self.query, str)
        if is_text != (isinstance(self.items, str) or isinstance(self.items[0], str)):
            raise InvalidRequestError(
                "query and items must be both texts or both token ids", "items"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Query and item joined, for each item."""
        items = [self.items] if isinstance(self.items, str) else self.items
        return [
            item + self.query if self.item_first else self.query + item  # type: ignore[operator]
            for item in items
        ]


class Scores(Struct, frozen=True):
    """A line for each item, with a probability for each label, as they were asked for."""

    scores: list[list[float]]
    model: str
    usage: Usage
    object: str = "scoring"
