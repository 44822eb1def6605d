"""SGLang's own API: `/generate`, and the requests that go with it."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.api_keys import caller_of
from sgl_jax.server.context import ServerContext, context_of
from sgl_jax.server.errors import ApiError
from sgl_jax.server.generation import DONE, failure_event, json_response, prepare_all, respond
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.logprobs import native_logprobs
from sgl_jax.server.meta_info import describe
from sgl_jax.server.native_protocol import (
    AbortBody,
    GenerateBody,
    Generated,
    NativeSampling,
)
from sgl_jax.server.native_stream import StreamedAnswer
from sgl_jax.server.openapi import answers, streamed_answers
from sgl_jax.server.session_owner import owner_of
from sgl_jax.server.session_protocol import session_turn
from sgl_jax.server.tenants import tenant_of

_DEFAULT_MAX_NEW_TOKENS = 128  # as in SGLang
_SAMPLING_NAMES = {name: f"sampling_params.{name}" for name in NativeSampling.model_fields}

router = APIRouter(tags=["native"], route_class=JsonRoute)


@router.post("/generate", responses=streamed_answers(Generated))
async def generate(body: GenerateBody, request: Request) -> Response:
    """Continue one or several prompts; the answer to a list is a list."""
    context = context_of(request)
    context.check_open()
    context.check_model(body.model)
    prompts = body.prompts
    tenant = tenant_of(request, body.user)
    turn = owner_of(request, tenant).own(session_turn(body.session_params))
    samplings = body.sampling_of(len(prompts))
    options = body.options_of(len(prompts))
    names = _SAMPLING_NAMES | {"text": body.prompt_field, "input_ids": body.prompt_field}
    requests = await prepare_all(
        request,
        names,
        context.encode_prompts(request, prompts, tenant),
        samplings,
        options,
        default_max_new_tokens=_DEFAULT_MAX_NEW_TOKENS,
        session=turn,
        tenant=tenant,
    )
    answer_format = NativeFormat(context, body)
    return await respond(request, requests, answer_format, streaming=body.stream, names=names)


@router.post("/abort_request", responses=answers())
async def abort_request(body: AbortBody, request: Request) -> Response:
    """End the caller's request `rid`, or all that are the caller's; an admin's, any or all.

    What they had generated is their answer.
    """
    if bool(body.rid) == body.abort_all:
        raise InvalidRequestError("send either rid or abort_all", "rid")
    caller = caller_of(request)
    sender = None if caller.is_admin else caller.name
    return json_response({"aborted": context_of(request).frontend.abort(body.rid, sender)})


class NativeFormat:
    """Answers of `/generate`. In a stream every event repeats all so far (SGLang's convention),
    unless the request or the server asks for increments."""

    def __init__(self, context: ServerContext, body: GenerateBody) -> None:
        self._body = body
        self._tokenizer = context.frontend.tokenizer if body.return_text_in_logprobs else None
        self._is_incremental = (
            context.args.incremental_streaming_output
            if body.stream_output is None
            else body.stream_output
        )
        self._streamed: dict[int, StreamedAnswer] = {}

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        if index not in self._streamed:
            self._streamed[index] = StreamedAnswer(
                stream,
                self._tokenizer,
                index=index if self._body.is_list else None,
                shows_prompt_ids=bool(self._body.return_prompt_token_ids),
                is_incremental=self._is_incremental,
            )
        return self._streamed[index].event(chunk)

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        return DONE

    def failure(self, error: ApiError) -> bytes:
        return failure_event(error)

    def whole(self, chunks: Sequence[Chunk], streams: Sequence[RequestStream]) -> Any:
        written = list(map(self._write, range(len(chunks)), chunks, streams))
        return written if self._body.is_list else written[0]

    def _write(self, index: int, chunk: Chunk, stream: RequestStream) -> Generated:
        logprobs = native_logprobs(
            stream.request, self._tokenizer, chunk.logprobs, chunk.prompt_logprobs
        )
        return Generated(
            chunk.text,
            chunk.token_ids,
            describe(stream, chunk.num_output_tokens, chunk.finish, **logprobs),
            index if self._body.is_list else UNSET,
            stream.request.input_ids if self._body.return_prompt_token_ids else UNSET,
        )
