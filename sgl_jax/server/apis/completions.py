"""The route `/v1/completions`: its body, answer and format."""

import codecs
from collections.abc import Sequence, Set

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, model_validator

from sgl_jax.core.engine_messages import TokenLogprobs
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.request_limits import MAX_CHOICES
from sgl_jax.core.sampling_params import MAX_TOP_LOGPROBS
from sgl_jax.engine.front.request_stream import Chunk, RequestStream
from sgl_jax.server.admin.openapi import answers
from sgl_jax.server.answer_stream import StreamGroup, respond
from sgl_jax.server.apis.openai import LOWEST_LOGPROB, AnswerHead, OpenAIFormat, Usage, field_names
from sgl_jax.server.fields import (
    ForEach,
    GenerationFields,
    SessionParams,
    TokenIds,
    prompts_of,
    refuse_several,
    session_turn,
)
from sgl_jax.server.guards.bodies import JsonRoute
from sgl_jax.server.guards.connection import LoopShare
from sgl_jax.server.references import References, references_of
from sgl_jax.server.requests import admit, prompt_requests
from sgl_jax.text.tokenizer import Tokenizer

_DEFAULT_COMPLETION_TOKENS = 16  # same as OpenAI's legacy API
router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)


class CompletionRequest(GenerationFields):
    """Body of `/v1/completions`."""

    prompt: str | TokenIds | ForEach[str] | ForEach[TokenIds]
    max_tokens: int | None = Field(default=None, ge=0, description="0 only with echo")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="must equal n")
    session_params: SessionParams | None = None

    @model_validator(mode="after")
    def _supported_combination(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequestError(
                f"best_of must equal n ({self.num_choices}), got {self.best_of}", "best_of"
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens 0 is allowed only with echo", "max_tokens")
        if self.session_params is not None:
            refuse_several(self.num_choices, "n")
            refuse_several(len(self.prompts), "prompt")
            if self.echo:
                raise InvalidRequestError("a session's turn cannot be echoed", "echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return prompts_of(self.prompt, self.num_choices, "prompt")


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists over tokens; `text_offset` counts characters from the start of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(AnswerHead, frozen=True):
    """A whole answer or a streamed chunk."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


@router.post("/completions", responses=answers(Completion, streams=True))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    refs, prompts = references_of(request), body.prompts
    admit(request, body, len(prompts) * body.num_choices)
    names = field_names(body, "max_tokens", "prompt")
    requests = await prompt_requests(
        request,
        body,
        prompts,
        [map(body.to_sampling, range(body.num_choices)) for _ in prompts],
        names,
        turn=session_turn(body.session_params),
        default_max_new_tokens=_DEFAULT_COMPLETION_TOKENS,
        return_logprob=body.logprobs is not None,
        top_logprobs_num=body.logprobs or 0,
        logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
    )
    echoes: list[str] = []
    share = LoopShare()
    for prompt in prompts if body.echo else ():
        if not isinstance(prompt, str):
            skips = body.skip_special_tokens is not False
            prompt = refs.frontend.tokenizer.decode(prompt, skip_special_tokens=skips)
            await share.pause()
        echoes += [prompt] * body.num_choices
    answer_format = CompletionFormat(refs, body, echoes)
    group = StreamGroup(request, requests, streaming=body.stream, names=names)
    return await respond(group, answer_format)


class CompletionFormat(OpenAIFormat):
    """Answers of `/v1/completions`. With `echo` the text begins with the prompt."""

    _kind, _type, _chunk_object = "cmpl", Completion, "text_completion"
    _body: CompletionRequest

    def __init__(
        self, refs: References, body: CompletionRequest, prompt_texts: Sequence[str]
    ) -> None:
        """Set up the format. `prompt_texts` is the echo of each choice; empty without `echo`."""
        super().__init__(refs, body)
        self._echoes = dict(enumerate(prompt_texts))
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    def _choice(self, index: int, chunk: Chunk, stream: RequestStream) -> CompletionChoice:
        echo, logprobs = self._echoes.pop(index, ""), None
        if self._body.logprobs is not None:
            if index not in self._offsets:
                self._offsets[index] = self._begin(echo, stream.request.input_ids)
            logprobs = self._logprobs(chunk, self._offsets[index])
        finish, shows_ids = chunk.finish, self._body.return_token_ids
        return CompletionChoice(
            index,
            echo + chunk.text,
            logprobs,
            None if finish is None else finish.type,
            None if finish is None else finish.matched,
            stream.request.input_ids if shows_ids else UNSET,
            chunk.token_ids if shows_ids else UNSET,
        )

    def _begin(self, echo: str, prompt: Sequence[int]) -> "TextOffsets":
        skips = self._body.skip_special_tokens is not False
        hidden = self._tokenizer.special_ids if skips else frozenset()
        return TextOffsets(self._tokenizer, prompt if self._body.echo else (), echo, hidden)

    def _logprobs(self, chunk: Chunk, offsets: "TextOffsets") -> CompletionLogprobs:
        written = CompletionLogprobs([], [], [], [])
        for entry in (*chunk.prompt_logprobs, *chunk.logprobs):
            written.tokens.append(self._text(entry.token_id))
            written.text_offset.append(offsets.advance(entry.token_id))
            if entry.logprob is None:  # the first token of a prompt has no prediction
                written.token_logprobs.append(None)
                written.top_logprobs.append(None)
                continue
            logprob = max(entry.logprob, LOWEST_LOGPROB)
            written.token_logprobs.append(logprob)
            written.top_logprobs.append(self._tops(entry, logprob))
        return written

    def _tops(self, entry: TokenLogprobs, logprob: float) -> dict[str, float]:
        """Return the alternatives by text, including the token itself.

        Different tokens may have the same text. The text then names the token itself, or else the
        likeliest of them; the remaining tokens are named by their ids.
        """
        values = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        values.setdefault(entry.token_id, logprob)
        named = {self._text(entry.token_id): entry.token_id}
        tops = {}
        for token, value in values.items():
            text = self._text(token)
            name = text if named.setdefault(text, token) == token else f"token_id:{token}"
            tops[name] = max(value, LOWEST_LOGPROB)
        return tops

    def _text(self, token_id: int) -> str:
        r"""Return a token's text; bytes other than UTF-8 as `bytes:\xNN`, like OpenAI."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextOffsets:
    """Counts the complete characters of an answer's text before each of its tokens."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], echo: str, hidden: Set[int]
    ) -> None:
        """Start at the end of the prompt's text.

        Args:
            prompt: the prompt's tokens; empty if they are not in the answer.
            echo: the prompt's text, possibly without the leading space of its first token.
            hidden: tokens without text.
        """
        self._token_bytes, self._hidden = tokenizer.token_bytes, hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        data = b"".join(self._token_bytes(i) for i in prompt if i not in hidden)
        self._num_chars = len(echo) - len(data.decode(errors="replace"))

    def advance(self, token_id: int) -> int:
        """Return the offset of the next token, and add its characters."""
        offset = max(self._num_chars, 0)
        if token_id not in self._hidden:
            self._num_chars += len(self._decoder.decode(self._token_bytes(token_id)))
        return offset
