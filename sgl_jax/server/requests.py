"""From bodies to the engine's requests: prompts are encoded, then checked with their sampling."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.grammar import Grammar
from sgl_jax.core.messages import CompileGrammar, GenerateRequest, SessionTurn
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.server.admin.calls import call_engine
from sgl_jax.server.chat_request import ChatRequest, NamedTool
from sgl_jax.server.errors import ApiError, client_names
from sgl_jax.server.fields import RequestFields
from sgl_jax.server.guards.connection import LoopShare, unless_gone
from sgl_jax.server.guards.keys import ANONYMOUS, caller_of, owner_of, tenant_of
from sgl_jax.server.references import References, references_of
from sgl_jax.server.text_pool import Ids
from sgl_jax.text.jobs import EncodeChat

_PROMPT_TAIL_TOKENS = 16  # in which a prompt opens or closes the reasoning


async def chat_requests(
    request: Request, chat: ChatRequest, names: Mapping[str, str]
) -> list[GenerateRequest]:
    """The engine's requests for all choices of a chat. Raises as `prompt_requests`."""
    refs = references_of(request)
    check_chat(refs, chat)
    grammar = _call_grammar(refs, chat) if chat.holds_calls else {}
    with client_names(names):
        ids = await encode_chat(request, chat)
        choices = [
            msgspec.structs.replace(chat.to_sampling(choice), **grammar)
            for choice in range(chat.num_choices)
        ]
    if choices[0].grammar is not None:
        reasoning = refs.answer_parser.reasoning_after(prompt_tail(refs, ids))
        choices = [msgspec.structs.replace(each, reasoning=reasoning) for each in choices]
    return await prompt_requests(
        request,
        chat,
        [ids],
        [choices],
        names,
        turn=None if chat.session_id is None else SessionTurn(id=chat.session_id, is_whole=True),
        return_logprob=bool(chat.logprobs),
        top_logprobs_num=chat.top_logprobs or 0,
    )


async def prompt_requests(
    request: Request,
    body: RequestFields,
    prompts: Sequence[str | list[int]],
    samplings: Iterable[Iterable[SamplingParams]],
    names: Mapping[str, str],
    *,
    turn: SessionTurn | None = None,
    **shared: Any,
) -> list[GenerateRequest]:
    """The engine's requests for all choices of all `prompts`, one prompt after the other.

    Args:
        samplings: one of each choice, for each prompt.
        names: as for `client_names`.
        turn: of a session, by the caller's id.
        shared: arguments of `RequestChecks.prepare` for all of them.

    Raises:
        InvalidRequestError: a request cannot be served.
        QueueFullError, TenantQueueFullError: the engine has no room for so many.
        ApiError: the server takes no work or has another model, encoding took too long, or the
            client went away.
    """
    refs, tenant, share = references_of(request), tenant_of(request, body.user), LoopShare()
    refs.check_open()
    refs.check_model(body.model)
    checks, requests = refs.frontend.checks, list[GenerateRequest]()
    shared |= {"session": owner_of(request, tenant).own(turn), "tenant": tenant}
    options = body.options_of(len(prompts))
    with client_names(names):
        refs.frontend.check_room(len(prompts), tenant)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            checks.check_text(text)
        encoded = iter(await encode_texts(request, texts))
        for prompt, choices, own in zip(prompts, samplings, options, strict=True):
            ids = _unpack(refs, next(encoded)) if isinstance(prompt, str) else prompt
            for sampling in choices:
                prepared = checks.prepare(ids, sampling, **own, **shared)
                grammar = checks.new_grammar(prepared)
                if grammar is not None:
                    await _compile(request, grammar)
                    checks.note_compiled(grammar)
                requests.append(prepared)
                await share.pause()
    return requests


async def _compile(request: Request, grammar: Grammar) -> None:
    """Have the engine compile a grammar. Raises `InvalidRequestError` if it refuses, and otherwise
    as `call_engine`."""
    refs = references_of(request)
    reply = await unless_gone(request.receive, call_engine(refs, CompileGrammar(grammar=grammar)))
    if reply.ok:
        return
    refs.frontend.check_alive()
    if "status_code" in reply.data:
        raise ApiError(reply.data["status_code"], reply.message)
    raise InvalidRequestError(reply.message, reply.data["param"])


def check_chat(refs: References, chat: ChatRequest) -> None:
    """Raise `InvalidRequestError` or `ApiError` if this server cannot take `chat` now."""
    refs.check_open()
    refs.check_model(chat.model)
    if not chat.shown_tools:
        return
    if not refs.answer_parser.reads_calls:
        raise InvalidRequestError(
            "tools: how this model writes calls is not known; start the server with "
            "--tool-call-parser",
            "tools",
        )
    if "tools" not in refs.frontend.tokenizer.chat_template:
        raise InvalidRequestError(
            "tools: the model's chat template does not tell it of tools; start the server "
            "with another --chat-template",
            "tools",
        )


def _call_grammar(refs: References, chat: ChatRequest) -> dict[str, str]:
    """The sampling parameter that holds the calls of the answer to the tools' schemas.

    Raises `InvalidRequestError` for tools whose calls cannot be held to them.
    """
    schemas, grammar = chat.held_schemas, refs.answer_parser.call_grammar
    assert grammar is not None, "tools are refused where the format of calls is unknown"
    try:
        marks = refs.answer_parser.marks(has_tools=True, has_reasoning=False)
        special = refs.frontend.tokenizer.special_ids_of(marks)
        if not chat.must_call:
            return {"ebnf": grammar.calls_amid_content(schemas, special)}
        is_single = not chat.calls_in_parallel or isinstance(chat.tool_choice, NamedTool)
        return {"ebnf": grammar.calls(schemas, special, is_single=is_single)}
    except ValueError as error:
        raise InvalidRequestError(f"tools: {error}", "tools") from error


def prompt_tail(refs: References, prompt: Sequence[int]) -> str:
    """The last characters of a prompt, special tokens included."""
    tokens = list(prompt[-_PROMPT_TAIL_TOKENS:])
    return refs.frontend.tokenizer.decode(tokens, skip_special_tokens=False)


async def encode_texts(
    request: Request, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[Ids]:
    """Token ids of each text, even if the engine has no room for them.

    Raises:
        InvalidRequestError: a text is too long for any prompt, or there is no tokenizer.
        ApiError: it took too long, or the client went away.
    """
    refs, special = references_of(request), add_special_tokens
    for text in texts:
        refs.frontend.checks.check_length(len(text))
    if refs.texts.is_short(texts):
        encode = refs.frontend.tokenizer.encode
        return [array("i", encode(text, add_special_tokens=special)) for text in texts]
    encoding = refs.texts.encode(_client_of(request), texts, add_special_tokens=special)
    return await unless_gone(request.receive, encoding)


async def encode_chat(request: Request, chat: ChatRequest) -> list[int]:
    """Token ids of the conversation. Raises as `prompt_requests`."""
    refs = references_of(request)
    tools = [tool.model_dump(exclude_none=True) for tool in chat.shown_tools]
    written_tools = msgspec.json.encode(tools or None)
    num_chars = sum(message.num_chars for message in chat.messages) + len(written_tools)
    refs.frontend.check_room(1, tenant_of(request, chat.user))
    refs.frontend.checks.check_length(num_chars)
    job = EncodeChat(
        msgspec.json.encode([message.for_template() for message in chat.messages]),
        written_tools,
        bool(chat.continue_final_message),
        msgspec.json.encode(chat.template_args),
        refs.limits.max_prompt_chars,
        refs.frontend.facts.max_request_tokens,
        refs.limits.text_seconds(num_chars),
    )
    encoding = refs.texts.encode_chat(_client_of(request), job)
    return _unpack(refs, await unless_gone(request.receive, encoding))


def _unpack(refs: References, ids: Ids) -> list[int]:
    refs.frontend.checks.check_num_tokens(len(ids))
    return ids.tolist()


def _client_of(request: Request) -> str:
    """The client under whose name the text pool queues a request: a key's name, or an address."""
    caller = caller_of(request)
    if caller.name != ANONYMOUS.name:
        return caller.name
    return "" if request.client is None else request.client.host
