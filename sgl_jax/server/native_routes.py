"""SGLang's own API: `/generate`, and the requests that go with it."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.messages import FinishReason
from sgl_jax.engine.request_stream import Chunk, RequestStream
from sgl_jax.server.context import ServerContext, context_of
from sgl_jax.server.errors import client_names
from sgl_jax.server.generation import Answer, event, json_response, respond
from sgl_jax.server.json_route import JsonRoute
from sgl_jax.server.logprobs import native_logprobs, native_top_logprobs
from sgl_jax.server.loop_share import LoopShare
from sgl_jax.server.native_protocol import (
    AbortBody,
    GenerateBody,
    Generated,
    MetaInfo,
    NativeSampling,
)
from sgl_jax.server.openapi import answers, streamed_answers
from sgl_jax.server.session_protocol import session_turn

_DEFAULT_MAX_NEW_TOKENS = 128  # as in SGLang

router = APIRouter(tags=["native"], route_class=JsonRoute)


@router.post("/generate", responses=streamed_answers(Generated))
async def generate(body: GenerateBody, request: Request) -> Response:
    """Continue one or several prompts; the answer to a list is a list."""
    context = context_of(request)
    context.check_open()
    prompts = body.prompts
    with client_names(_names(body)):
        encoded = await context.encode_prompts(request, prompts)
    each = zip(
        encoded,
        body.sampling_of(len(prompts)),
        body.rids_of(len(prompts)),
        body.namespaces_of(len(prompts)),
        body.priorities_of(len(prompts)),
        strict=True,
    )
    requests = []
    share = LoopShare()
    with client_names(_names(body)):
        for ids, sampling, rid, namespace, priority in each:
            requests.append(
                context.frontend.prepare(
                    ids,
                    sampling,
                    rid=rid,
                    default_max_new_tokens=_DEFAULT_MAX_NEW_TOKENS,
                    return_logprob=bool(body.return_logprob),
                    top_logprobs_num=(body.top_logprobs_num or 0) if body.return_logprob else 0,
                    logprob_start_len=_logprob_start(body),
                    dp_rank=body.dp_rank,
                    session=session_turn(body.session_params),
                    namespace=namespace,
                    priority=priority,
                )
            )
            await share.pause()
    return await respond(
        request,
        context.frontend,
        requests,
        NativeFormat(context, body),
        streaming=bool(body.stream),
    )


@router.post("/abort_request", responses=answers())
async def abort_request(body: AbortBody, request: Request) -> Response:
    """End a request by its `rid`, or all of them; what they had generated is their answer."""
    if bool(body.rid) == body.abort_all:
        raise InvalidRequestError("send either rid or abort_all", "rid")
    return json_response({"aborted": context_of(request).frontend.abort(body.rid)})


class NativeFormat:
    """Answers of `/generate`. In a stream every event repeats all so far: SGLang's convention."""

    def __init__(self, context: ServerContext, body: GenerateBody) -> None:
        self._body = body
        self._tokenizer = context.frontend.tokenizer if body.return_text_in_logprobs else None
        self._so_far: dict[int, Answer] = {}

    def event(self, index: int, chunk: Chunk, stream: RequestStream) -> bytes:
        answer = self._so_far.get(index)
        if answer is None:
            answer = self._so_far[index] = Answer(stream)
        answer.add(chunk)
        return event(self._write(index, answer))

    def closing(self, streams: Sequence[RequestStream]) -> bytes:
        return b""

    def whole(self, answers: Sequence[Answer]) -> Any:
        written = [self._write(index, answer) for index, answer in enumerate(answers)]
        return written if self._body.is_list else written[0]

    def _write(self, index: int, answer: Answer) -> Generated:
        stream = answer.stream
        finish = answer.finish
        meta = MetaInfo(
            id=stream.client_rid,
            prompt_tokens=stream.num_prompt_tokens,
            completion_tokens=len(answer.token_ids),
            cached_tokens=stream.cached_tokens,
            finish_reason=None if finish is None else _finish(finish, len(answer.token_ids)),
            dp_rank=stream.dp_rank,
            e2e_latency=UNSET if finish is None else stream.e2e_latency_s,
            **self._logprobs(answer),
        )
        shown_index = index if self._body.is_list else UNSET
        return Generated(answer.text, answer.token_ids, meta, shown_index)

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        if not self._body.return_logprob:
            return {}
        written: dict[str, Any] = {}
        parts = {"output": answer.logprobs, "input": answer.prompt_logprobs}
        for part, entries in parts.items():
            if part == "input" and _logprob_start(self._body) < 0:
                continue
            written[f"{part}_token_logprobs"] = native_logprobs(self._tokenizer, entries)
            if self._body.top_logprobs_num:
                written[f"{part}_top_logprobs"] = native_top_logprobs(self._tokenizer, entries)
        return written


def _finish(finish: FinishReason, num_tokens: int) -> dict[str, int | str | None]:
    match finish.type:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": num_tokens}
    return {"type": "abort", "message": finish.message}


def _logprob_start(body: GenerateBody) -> int:
    if not body.return_logprob or body.logprob_start_len is None:
        return -1
    return body.logprob_start_len


def _names(body: GenerateBody) -> dict[str, str]:
    sampling = {name: f"sampling_params.{name}" for name in NativeSampling.model_fields}
    return sampling | {"text": body.prompt_field, "input_ids": body.prompt_field}
