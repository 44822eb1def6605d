"""What requests of every protocol say beside prompt and sampling, with one entry a prompt."""

from typing import Any

from pydantic import Field

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import Namespace
from sgl_jax.core.request_limits import for_each, one_namespace
from sgl_jax.server import unserved_fields
from sgl_jax.server.strict_model import ForEach, Priority, Rid, StrictModel, User

_RANK_FIELDS = ("dp_rank", "routed_dp_rank", "data_parallel_rank")


class RequestFields(StrictModel):
    """The fields that all protocols share. A list has one entry for each prompt."""

    unserved = unserved_fields.REQUEST

    model: str = "default"
    stream: bool | None = None
    rid: Rid | ForEach[Rid] | None = Field(default=None, description="name of the request")
    dp_rank: int | None = Field(default=None, ge=0, description="data-parallel rank to run on")
    routed_dp_rank: int | None = Field(default=None, ge=0, description="same as dp_rank")
    data_parallel_rank: int | None = Field(default=None, ge=0, description="same as dp_rank")
    cache_salt: Namespace | ForEach[Namespace] | None = Field(
        default=None, description="cached prefixes are shared only with requests of the same"
    )
    extra_key: Namespace | ForEach[Namespace] | None = Field(
        default=None, description="same as cache_salt"
    )
    priority: Priority | ForEach[Priority] | None = Field(
        default=None, description="without effect but with --enable-priority-scheduling"
    )
    user: User | None = Field(
        default=None, description='the tenant, unless the API key names one; "": none'
    )

    def options_of(self, num_prompts: int) -> list[dict[str, Any]]:
        """Those of each prompt, as `RequestChecks.prepare` takes them. Raises
        `InvalidRequestError` for a list of another length, and for several ranks."""
        ranks = [(getattr(self, name), name) for name in _RANK_FIELDS]
        given = [(rank, name) for rank, name in ranks if rank is not None]
        dp_rank, _ = given[0] if given else (None, "")
        if any(rank != dp_rank for rank, _ in given):
            raise InvalidRequestError(
                f"{', '.join(_RANK_FIELDS)} are names of one field: send one of them", given[-1][1]
            )
        each = zip(
            for_each("rid", self.rid, num_prompts),
            for_each("extra_key", self.extra_key, num_prompts),
            for_each("cache_salt", self.cache_salt, num_prompts),
            for_each("priority", self.priority, num_prompts),
            strict=True,
        )
        return [
            {
                "rid": rid,
                "dp_rank": dp_rank,
                "namespace": one_namespace(key, salt),
                "priority": priority,
            }
            for rid, key, salt, priority in each
        ]
