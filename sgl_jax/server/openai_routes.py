"""The OpenAI API: models, chat completions, completions."""

from fastapi import APIRouter, Request, Response

from sgl_jax.server.chat import answer_chat
from sgl_jax.server.connection import LoopShare
from sgl_jax.server.context import ServerContext, context_of
from sgl_jax.server.generation import json_response, prepare_all, respond
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.openai_formats import ChatFormat, CompletionFormat
from sgl_jax.server.openai_protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
)
from sgl_jax.server.openai_responses import ChatCompletion, Completion, ModelCard, ModelList
from sgl_jax.server.openapi import answers, streamed_answers
from sgl_jax.server.session_owner import owner_of
from sgl_jax.server.session_protocol import session_turn
from sgl_jax.server.tenants import tenant_of

_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's legacy API

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)


@router.get("/models", responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """The one model that is served."""
    return json_response(ModelList([_card(context_of(request))]))


@router.get("/models/{model:path}", responses=answers(ModelCard))
async def get_model(model: str, request: Request) -> Response:
    """The model of this name, if it is the one."""
    context = context_of(request)
    context.check_model(model)
    return json_response(_card(context))


@router.post("/chat/completions", responses=streamed_answers(ChatCompletion))
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    names = _names(body, limit, "messages")
    return await answer_chat(request, body, ChatFormat(context_of(request), body), names)


@router.post("/completions", responses=streamed_answers(Completion))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    context = context_of(request)
    context.check_open()
    context.check_model(body.model)
    prompts = body.prompts
    tenant = tenant_of(request, body.user)
    turn = owner_of(request, tenant).own(session_turn(body.session_params))
    options = body.options_of(len(prompts))
    names = _names(body, "max_tokens", "prompt")
    requests = await prepare_all(
        request,
        names,
        context.encode_prompts(request, prompts, tenant),
        [body] * len(prompts),
        options,
        default_max_new_tokens=_DEFAULT_COMPLETION_TOKENS,
        return_logprob=body.logprobs is not None,
        top_logprobs_num=body.logprobs or 0,
        logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
        session=turn,
        tenant=tenant,
    )
    echoes: list[str] = []
    share = LoopShare()
    for prompt in prompts if body.echo else ():
        if not isinstance(prompt, str):
            skips = body.skip_special_tokens is not False
            prompt = context.frontend.tokenizer.decode(prompt, skip_special_tokens=skips)
            await share.pause()
        echoes += [prompt] * body.num_choices
    answer_format = CompletionFormat(context, body, echoes)
    return await respond(request, requests, answer_format, streaming=body.stream, names=names)


def _names(body: GenerationFields, limit: str, prompt: str) -> dict[str, str]:
    """Our names of fields -> this client's."""
    formats = {} if body.response_format is None else body.response_format.grammar()
    return {
        **dict.fromkeys(formats, "response_format"),
        "max_new_tokens": limit,
        "min_new_tokens": "min_new_tokens" if body.min_tokens is None else "min_tokens",
        "text": prompt,
        "input_ids": prompt,
        "top_logprobs_num": "logprobs",
    }


def _card(context: ServerContext) -> ModelCard:
    return ModelCard(
        context.model_name,
        context.created,
        context.args.model_path,
        context.frontend.facts.max_context_len,
    )
