"""SGLang's own API: `/generate`, and the requests that go with it."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.api_keys import caller_of
from sgl_jax.server.connection import LoopShare
from sgl_jax.server.context import ServerContext, context_of
from sgl_jax.server.errors import client_names
from sgl_jax.server.generation import Answer, json_response, respond
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
    turn = owner_of(request).own(session_turn(body.session_params))
    each = zip(
        body.sampling_of(len(prompts)),
        body.logprobs_of(len(prompts)),
        body.options_of(len(prompts)),
        strict=True,
    )
    num_choices = body.num_choices
    requests: list[GenerateRequest] = []
    names = _names(body)
    with client_names(names):
        encoded = await context.encode_prompts(request, prompts)
        share = LoopShare()
        for ids, (sampling, logprobs, options) in zip(encoded, each, strict=True):
            for choice in range(num_choices):
                prepared = context.frontend.checks.prepare(
                    ids,
                    sampling.to_sampling(sampling.max_new_tokens, choice),
                    default_max_new_tokens=_DEFAULT_MAX_NEW_TOKENS,
                    session=turn,
                    **logprobs._asdict(),
                    **options._asdict(),
                )
                requests.append(prepared)
                await share.pause()
    return await respond(
        request,
        context,
        requests,
        NativeFormat(context, body),
        streaming=bool(body.stream),
        names=names,
    )


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
        return b""

    def whole(self, answers: Sequence[Answer]) -> Any:
        written = [self._write(index, answer) for index, answer in enumerate(answers)]
        return written if self._body.is_list else written[0]

    def _write(self, index: int, answer: Answer) -> Generated:
        stream = answer.stream
        logprobs = native_logprobs(
            stream.request, self._tokenizer, answer.logprobs, answer.prompt_logprobs
        )
        return Generated(
            answer.text,
            answer.token_ids,
            describe(stream, len(answer.token_ids), answer.finish, **logprobs),
            index if self._body.is_list else UNSET,
            stream.request.input_ids if self._body.return_prompt_token_ids else UNSET,
        )


def _names(body: GenerateBody) -> dict[str, str]:
    return _SAMPLING_NAMES | {"text": body.prompt_field, "input_ids": body.prompt_field}
