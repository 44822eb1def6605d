"""What the routes share: the front, the model's name, and whether the server still takes work."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import Request

from sgl_jax.core.messages import FrontMessage, Reply
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.frontend import Frontend
from sgl_jax.engine.health import EngineHealth
from sgl_jax.metrics.engine_metrics import EngineMetrics
from sgl_jax.server.errors import ApiError

# Longer texts are tokenised on another thread, so that streams go on meanwhile.
_LONG_TEXT_CHARS = 16_384
# What clients and sglang-router send where only one model is known.
_DEFAULT_MODELS = ("default", "unknown")


@dataclasses.dataclass
class ServerContext:
    """One per server; of all this only `draining` changes while it serves."""

    args: ServerArgs
    frontend: Frontend
    engine_info: dict[str, Any]
    engine_metrics: EngineMetrics
    health: EngineHealth
    draining: bool = False
    answer_timeout_s: float = 30.0  # how long the engine may take to answer; it may be in a step
    reader_timeout_s: float = 60.0  # how long a client may take to read a piece of its stream
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The model's name in the OpenAI API."""
        return self.args.served_model_name or Path(self.args.model_path).resolve().name

    def check_model(self, name: str) -> None:
        """Raise 404 unless `name` is the model served here."""
        if name not in (self.model_name, self.args.model_path, *_DEFAULT_MODELS):
            raise ApiError(
                404,
                f"no model {name!r} here; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        """Raise what ends in a 503 if new work is not taken now."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        self.frontend.check_alive()
        self.health.check()

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without holding up the event loop for long."""
        return await self.off_loop_if_long(len(text), lambda: self.frontend.encode(text))

    async def off_loop_if_long(self, num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
        """Run `encode` here for a short text, on a thread for a long one."""
        return encode() if num_chars < _LONG_TEXT_CHARS else await asyncio.to_thread(encode)

    async def ask(
        self,
        make_message: Callable[[str], FrontMessage],
        timeout_s: float | None = None,
        *,
        on_unheard: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """Ask the engine and wait for its answer.

        Args:
            timeout_s: by default `answer_timeout_s`.
            on_unheard: gets the answer if nobody waits for it any more, because time was up or
                whoever asked was cancelled: the engine does what it was asked all the same.

        Raises:
            ApiError: 503, no answer in time.
            EngineStuckError: there would be none.
        """
        self.health.check()
        timeout_s = self.answer_timeout_s if timeout_s is None else timeout_s
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def on_reply(reply: Reply) -> None:
            if not answer.done():
                answer.set_result(reply)
            elif on_unheard is not None:
                on_unheard(reply)

        self.frontend.ask(make_message, on_reply)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            if on_unheard is not None and answer.done() and not answer.cancelled():
                on_unheard(answer.result())  # it came in the moment of giving up
            if isinstance(error, asyncio.CancelledError):
                raise
            raise ApiError(503, f"the engine gave no answer within {timeout_s:g} s") from error


def context_of(request: Request) -> ServerContext:
    """The context of the app that serves `request`."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context
