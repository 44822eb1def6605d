"""Converts bodies to engine requests: encodes prompts, then checks them with their sampling."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import msgspec
from fastapi import Request

from sgl_jax.core.image_input import ImageInput
from sgl_jax.core.messages import GenerateRequest, SessionTurn
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.server.agent_hints import reuse_of
from sgl_jax.server.chat_request import ChatRequest, ImageUrl
from sgl_jax.server.errors import client_names
from sgl_jax.server.fields import RequestFields
from sgl_jax.server.guards.connection import LoopShare, unless_gone
from sgl_jax.server.guards.keys import ANONYMOUS, SessionOwner, caller_of, owner_of, tenant_of
from sgl_jax.server.images import Prompt, check_images, decode_images, place_images
from sgl_jax.server.references import References, references_of
from sgl_jax.server.text_pool import Ids
from sgl_jax.text.jobs import EncodeChat, EncodeTexts

_SHORT_CHARS = 2048  # total of a request, tokenized within a millisecond
_JOB_CHARS = 65_536  # maximum size of a job for the workers


def admit(
    request: Request, body: RequestFields, num_requests: int, *, embeds: bool = False
) -> None:
    """Raise unless the server takes `num_requests` requests of `body` now. Call it before any work.

    `embeds` is True if they are for embeddings, not for text.

    Raises:
        InvalidRequestError: there are too many of them to be ever accepted together.
        QueueFullError, TenantQueueFullError: the engine has no room for so many requests.
        ApiError: the server takes no work, or has another model, or one for the other task.
    """
    refs = references_of(request)
    refs.check_open()
    refs.check_model(body.model)
    refs.check_task(embeds=embeds)
    refs.frontend.pending.check_room(num_requests, tenant_of(request, body.user))


async def prompt_requests(
    request: Request,
    body: RequestFields,
    prompts: Sequence[str | list[int]],
    samplings: Iterable[Iterable[SamplingParams]],
    names: Mapping[str, str],
    *,
    images: Sequence[tuple[ImageInput, ...]] | None = None,
    turn: SessionTurn | None = None,
    call_token_ids: tuple[int, ...] = (),
    **shared: Any,
) -> list[GenerateRequest]:
    """Return the engine's requests for all choices of all `prompts`, one prompt after another.

    `admit` comes first.

    Args:
        samplings: for each prompt, the parameters of each choice.
        names: engine field -> the client's name of it, for errors.
        images: of each prompt, which is then token ids; None: there are none.
        turn: the turn of a session, by the caller's id.
        call_token_ids: as in `Reuse`.
        shared: arguments of `RequestChecks.prepare`, for all requests.

    Raises:
        InvalidRequestError: a request cannot be served.
        ApiError: encoding took too long, or the client went away.
    """
    refs, tenant, share = references_of(request), tenant_of(request, body.user), LoopShare()
    checks, requests = refs.frontend.checks, list[GenerateRequest]()
    owner = owner_of(request, tenant)
    shared |= {"session": owner.own(turn), "tenant": tenant}
    reuse, num_unknown_hints = reuse_of(request, tenant, body, call_token_ids)
    shared |= {"reuse": reuse, "num_unknown_hints": num_unknown_hints}
    options = body.options_of(len(prompts))
    with client_names(names):
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            checks.check_text(text)
        encoded = iter(await encode_texts(request, texts))
        placed = images or [()] * len(prompts)
        for prompt, pictures, choices, own in zip(prompts, placed, samplings, options, strict=True):
            ids = _unpack(refs, next(encoded)) if isinstance(prompt, str) else prompt
            for sampling in choices:
                prepared = checks.prepare(ids, sampling, images=pictures, **own, **shared)
                _note_clamped(request, sampling, prepared.sampling)
                requests.append(_in_namespace(prepared, owner))
                await share.pause()
    return requests


def _note_clamped(request: Request, asked: SamplingParams, given: SamplingParams) -> None:
    room, wanted = given.max_new_tokens, asked.max_new_tokens
    if room is not None and wanted and room < wanted:
        least = getattr(request.state, "clamped_max_tokens", room)
        request.state.clamped_max_tokens = min(least, room)


def _in_namespace(request: GenerateRequest, owner: SessionOwner) -> GenerateRequest:
    """Return the request in the tenant's namespace, unless a turn uses its session's namespace."""
    if request.session is not None and not request.namespace:
        return request
    return msgspec.structs.replace(request, namespace=owner.namespace(request.namespace))


async def encode_texts(
    request: Request, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[Ids]:
    """Return the token ids of each text.

    Raises:
        InvalidRequestError: a text is too long for any prompt, or there is no tokenizer.
        ApiError: encoding took too long, or the client went away.
    """
    refs, special = references_of(request), add_special_tokens
    for text in texts:
        refs.frontend.checks.check_length(len(text))
    if sum(map(len, texts)) <= _SHORT_CHARS:  # costs less than a worker
        encode = refs.frontend.tokenizer.encode
        return [array("i", encode(text, add_special_tokens=special)) for text in texts]
    jobs = [
        EncodeTexts(piece, refs.limits.text_seconds(sum(map(len, piece))), special)
        for piece in pieces_of(texts)
    ]
    return await unless_gone(request.receive, refs.texts.run(client_of(request), jobs))


def pieces_of(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield groups of adjacent texts of up to `_JOB_CHARS`; a longer text is a group by itself."""
    piece: list[str] = []
    num_chars = 0
    for text in texts:
        if piece and num_chars + len(text) > _JOB_CHARS:
            yield piece
            piece, num_chars = [], 0
        piece.append(text)
        num_chars += len(text)
    if piece:
        yield piece


async def encode_with_images(
    request: Request, prompts: Sequence[str | list[int]], images: Sequence[Sequence[ImageUrl]]
) -> list[Prompt]:
    """Return each of `prompts` with its `images` in place of the model's placeholders.

    Raises as `encode_texts`, and `InvalidRequestError` if an image is refused.
    """
    refs, urls = references_of(request), list(chain(*images))
    check_images(refs, urls)
    settings, text_of = refs.image_settings, refs.frontend.tokenizer.text_of
    texts = [
        settings.expanded(prompt, text_of) if settings is not None and own else prompt
        for prompt, own in zip(prompts, images, strict=True)
        if isinstance(prompt, str)
    ]
    encoded = iter(await encode_texts(request, texts))
    decoded = iter(await decode_images(request, client_of(request), urls))
    return [
        place_images(
            _unpack(refs, next(encoded)) if isinstance(prompt, str) else prompt,
            list(islice(decoded, len(own))),
            settings,
        )
        for prompt, own in zip(prompts, images, strict=True)
    ]


async def count_chat(request: Request, chat: ChatRequest) -> int:
    """Return the number of tokens of the conversation. Raises as `encode_chat`."""
    return len((await encode_chat(request, chat)).input_ids)


async def encode_chat(request: Request, chat: ChatRequest) -> Prompt:
    """Return the token ids and images of the conversation.

    Raises `InvalidRequestError` if it is too long or an image is refused, and `ApiError` if
    encoding takes too long or the client goes away.
    """
    refs = references_of(request)
    tools = [tool.model_dump(exclude_none=True) for tool in chat.shown_tools]
    written_tools = msgspec.json.encode(tools or None)
    num_chars = sum(message.num_chars for message in chat.messages) + len(written_tools)
    refs.frontend.checks.check_length(num_chars)
    settings, urls = refs.image_settings, chat.images
    check_images(refs, urls)
    job = EncodeChat(
        msgspec.json.encode([message.for_template() for message in chat.messages]),
        written_tools,
        bool(chat.continue_final_message),
        msgspec.json.encode(chat.template_args),
        refs.limits.max_prompt_chars,
        refs.frontend.facts.max_request_tokens,
        refs.limits.text_seconds(num_chars),
        refs.texts.abilities,
        settings,
        len(urls),
    )
    (ids,) = await unless_gone(request.receive, refs.texts.run(client_of(request), [job]))
    # The images last, so that they are held for a short time.
    images = await decode_images(request, client_of(request), urls)
    return place_images(_unpack(refs, ids), images, settings)


def _unpack(refs: References, ids: Ids) -> list[int]:
    refs.frontend.checks.check_num_tokens(len(ids))
    return ids.tolist()


def client_of(request: Request) -> str:
    caller = caller_of(request)
    if caller.name != ANONYMOUS.name:
        return caller.name
    return "" if request.client is None else request.client.host
