"""The route `/v1/embeddings`: normalized hidden states of the prompts' last tokens."""

import base64
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from msgspec import Struct
from pydantic import Field

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import Float32Array
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import StreamGroup, json_response, whole_chunks
from sgl_jax.server.apis.openai import Usage, usage_of
from sgl_jax.server.fields import ForEach, TokenIds, WholeAnswerFields, prompts_of
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.guards.connection import LoopShare
from sgl_jax.server.references import references_of
from sgl_jax.server.requests import admit, prompt_requests

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)
_PROMPT_ONLY = SamplingParams(max_new_tokens=0, temperature=0.0)


class EmbeddingsBody(WholeAnswerFields):
    """Body of `/v1/embeddings`: one text or a list, or their token ids."""

    input: str | TokenIds | ForEach[str] | ForEach[TokenIds]
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="default: float; base64: of little-endian float32"
    )
    dimensions: int | None = Field(
        default=None, ge=1, description="keep so many, and normalize them; default: all"
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        return prompts_of(self.input, 1, "input")


class EmbeddingEntry(Struct, frozen=True):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(Struct, frozen=True):
    """The embeddings, in the order of the input."""

    data: list[EmbeddingEntry]
    model: str
    usage: Usage
    object: str = "list"


@router.post("/v1/embeddings", responses=answers(EmbeddingList))
@router.post("/embeddings", responses=answers(EmbeddingList))
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Return the embedding of each input, a vector of length 1."""
    refs, prompts = references_of(request), body.prompts
    admit(request, body, len(prompts), embeds=True)
    size = refs.engine_info["hidden_size"]
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequestError(
            f"dimensions must be in [1, {size}], got {body.dimensions}", "dimensions"
        )
    names = dict.fromkeys(("text", "input_ids"), "input")
    choices = [[_PROMPT_ONLY]] * len(prompts)
    requests = await prompt_requests(request, body, prompts, choices, names, return_hidden=True)
    group = StreamGroup(request, requests, streaming=False, names=names)
    await whole_chunks(group)
    data: list[Any] = []
    share = LoopShare()
    for index, stream in enumerate(group.streams):
        assert stream.hidden is not None, "the request asked for it"
        vector = _embedding(stream.hidden, body.dimensions)
        is_text = body.encoding_format == "base64"
        written = base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist()
        data.append(msgspec.Raw(msgspec.json.encode(EmbeddingEntry(index, written))))
        await share.pause()
    return json_response(EmbeddingList(data, refs.model_name, usage_of(group.streams)))


def _embedding(hidden: bytes, dimensions: int | None) -> Float32Array:
    """Return the first `dimensions` of a hidden state, normalized."""
    vector = np.frombuffer(hidden, "<f4")[:dimensions].astype(np.float64)
    length = np.linalg.norm(vector)
    return (vector / max(length, np.finfo(np.float64).tiny)).astype("<f4")
