"""How likely tokens are to come next, after each of several prompts: one step each, no text."""

import math
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from sgl_jax.server.connection import CLIENT_GONE, while_connected
from sgl_jax.server.context import context_of
from sgl_jax.server.generation import StreamGroup, gather, json_response, prepare_all
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.openai_formats import usage_of
from sgl_jax.server.openapi import answers
from sgl_jax.server.sampling_fields import SamplingFields
from sgl_jax.server.score_protocol import ScoreBody, Scores
from sgl_jax.server.tenants import tenant_of

router = APIRouter(tags=["text"], route_class=JsonRoute)

_ONE_TOKEN = SamplingFields(temperature=0.0, ignore_eos=True)


@router.post("/v1/score", responses=answers(Scores))
@router.post("/score", responses=answers(Scores))
async def score(body: ScoreBody, request: Request) -> Response:
    """Probabilities of `label_token_ids` right after each item."""
    context = context_of(request)
    context.check_open()
    context.check_model(body.model)
    prompts = body.prompts
    tenant = tenant_of(request, body.user)
    names = dict.fromkeys(("text", "input_ids"), "items") | {"token_ids_logprob": "label_token_ids"}
    requests = await prepare_all(
        request,
        names,
        context.encode_prompts(request, prompts, tenant),
        [_ONE_TOKEN] * len(prompts),
        body.options_of(len(prompts)),
        default_max_new_tokens=1,
        return_logprob=True,
        token_ids_logprob=body.label_token_ids,
        tenant=tenant,
    )
    group = StreamGroup(request, requests, streaming=False, names=names)
    chunks = await while_connected(request.receive, gather(group))
    if chunks is None:
        return Response(status_code=CLIENT_GONE)
    logprobs = [chunk.logprobs[0].id_logprobs for chunk in chunks]
    found = [_among_themselves(each) if body.apply_softmax else _exp(each) for each in logprobs]
    return json_response(Scores(found, context.model_name, usage_of(group.streams)))


def _exp(logprobs: Sequence[float]) -> list[float]:
    return [math.exp(logprob) for logprob in logprobs]


def _among_themselves(logprobs: Sequence[float]) -> list[float]:
    powers = _exp([logprob - max(logprobs) for logprob in logprobs])
    return [power / sum(powers) for power in powers]
