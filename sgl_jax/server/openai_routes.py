"""The OpenAI API: models, chat completions, completions."""

from fastapi import APIRouter, Request, Response

from sgl_jax.core.messages import GenerateRequest, SessionTurn
from sgl_jax.server.connection import LoopShare
from sgl_jax.server.context import ServerContext, context_of
from sgl_jax.server.errors import client_names
from sgl_jax.server.generation import json_response, respond
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.openai_formats import ChatFormat, CompletionFormat
from sgl_jax.server.openai_protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
)
from sgl_jax.server.openai_responses import ChatCompletion, Completion, ModelCard, ModelList
from sgl_jax.server.openapi import answers, streamed_answers
from sgl_jax.server.request_fields import RequestOptions
from sgl_jax.server.session_owner import owner_of
from sgl_jax.server.session_protocol import session_turn

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
    context = context_of(request)
    context.check_open()
    context.check_model(body.model)
    messages = [message.for_template() for message in body.messages]
    turn = None if body.session_id is None else SessionTurn(id=body.session_id, is_whole=True)
    turn = owner_of(request).own(turn)
    (options,) = body.options_of(1)
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    requests: list[GenerateRequest] = []
    names = _names(body, limit, "messages")
    with client_names(names):
        prompt = await context.encode_chat(
            request,
            messages,
            continue_final_message=bool(body.continue_final_message),
            template_args=body.template_args,
        )
        share = LoopShare()
        for choice in range(body.num_choices):
            prepared = context.frontend.checks.prepare(
                prompt,
                body.to_sampling(body.max_completion_tokens or body.max_tokens, choice),
                return_logprob=bool(body.logprobs),
                top_logprobs_num=body.top_logprobs or 0,
                session=turn,
                **options._asdict(),
            )
            requests.append(prepared)
            await share.pause()
    return await respond(
        request,
        context,
        requests,
        ChatFormat(context, body),
        streaming=bool(body.stream),
        names=names,
    )


@router.post("/completions", responses=streamed_answers(Completion))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    context = context_of(request)
    context.check_open()
    context.check_model(body.model)
    prompts = body.prompts
    turn = owner_of(request).own(session_turn(body.session_params))
    options_of_each = body.options_of(len(prompts))
    echoes: list[str] = []
    requests: list[GenerateRequest] = []
    names = _names(body, "max_tokens", "prompt")
    with client_names(names):
        encoded = await context.encode_prompts(request, prompts)
        share = LoopShare()
        for prompt, ids, options in zip(prompts, encoded, options_of_each, strict=True):
            for choice in range(body.num_choices):
                requests.append(_completion(context, body, ids, choice, options, turn))
                await share.pause()
            if body.echo:
                text = prompt if isinstance(prompt, str) else _decode(context, body, ids)
                echoes += [text] * body.num_choices
    return await respond(
        request,
        context,
        requests,
        CompletionFormat(context, body, echoes),
        streaming=bool(body.stream),
        names=names,
    )


def _completion(
    context: ServerContext,
    body: CompletionRequest,
    ids: list[int],
    choice: int,
    options: RequestOptions,
    turn: SessionTurn | None,
) -> GenerateRequest:
    wants_prompt_logprobs = bool(body.echo) and body.logprobs is not None
    return context.frontend.checks.prepare(
        ids,
        body.to_sampling(body.max_tokens, choice),
        default_max_new_tokens=_DEFAULT_COMPLETION_TOKENS,
        return_logprob=body.logprobs is not None,
        top_logprobs_num=body.logprobs or 0,
        logprob_start_len=0 if wants_prompt_logprobs else -1,
        session=turn,
        **options._asdict(),
    )


def _decode(context: ServerContext, body: CompletionRequest, ids: list[int]) -> str:
    skip = True if body.skip_special_tokens is None else body.skip_special_tokens
    return context.frontend.tokenizer.decode(ids, skip_special_tokens=skip)


def _names(body: GenerationFields, limit: str, prompt: str) -> dict[str, str]:
    """Our names of fields -> this client's."""
    return {
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
