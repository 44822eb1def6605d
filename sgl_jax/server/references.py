"""The objects shared by the routes, and the two checks that precede every request."""

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Request

from sgl_jax.core.embedding_model import embedding_refusal
from sgl_jax.core.image_input import ImageSettings
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.front.frontend import Frontend
from sgl_jax.engine.front.health import EngineHealth
from sgl_jax.metrics.engine_metrics import EngineMetrics
from sgl_jax.server.errors import ApiError
from sgl_jax.server.guards.limits import Limits
from sgl_jax.server.text_pool import TextPool
from sgl_jax.text.answer_parser import AnswerParser, choose_parser

# Failed steps in a row after which the server counts as not ready.
_UNREADY_STEP_FAILURES = 3
# Names sent by clients and sglang-router to a server of one model.
_DEFAULT_MODELS = ("default", "unknown")


@dataclass
class References:
    """One object per server. `draining` and the last update of the weights change, and the engine
    updates `engine_info`."""

    args: ServerArgs
    frontend: Frontend
    engine_info: dict[str, Any]
    engine_metrics: EngineMetrics
    limits: Limits
    texts: TextPool
    health: EngineHealth
    draining: bool = False
    # The frontend's `num_weight_changes` at `/begin_weight_update`; None: no update has begun.
    changes_at_begin: int | None = None
    num_missing: int | None = None  # after the last tensors; None: none since, or refused
    answer_timeout_s: float = 30.0  # for the engine's reply to a call, possibly after a step
    reader_timeout_s: float = 60.0  # for a client to read a piece of its stream
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.args.model_name

    @functools.cached_property
    def answer_parser(self) -> AnswerParser:
        """Return the parser of tool calls and reasoning in this model's answers."""
        template = self.frontend.tokenizer.chat_template
        return choose_parser(self.args.tool_call_parser, self.args.reasoning_parser, template)

    @property
    def model_path(self) -> str:
        return str(self.engine_info["model_path"])

    @property
    def is_paused(self) -> bool:
        """Return whether requests wait until generation is continued."""
        return bool(self.engine_info["is_paused"])

    @property
    def image_settings(self) -> ImageSettings | None:
        """What the model's images must be like; None if it takes none."""
        given = self.engine_info.get("images")
        return None if given is None else msgspec.convert(given, ImageSettings)

    def check_model(self, name: str) -> None:
        """Raise `ApiError` 404 unless `name` is the model served here."""
        if name not in (self.model_name, self.args.model_path, *_DEFAULT_MODELS):
            raise ApiError(
                404,
                f"no model {name!r} here; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    @functools.cached_property
    def _embedding_refusal(self) -> str:
        return embedding_refusal(Path(self.args.model_path), is_embedding=self.args.is_embedding)

    def check_task(self, *, embeds: bool) -> None:
        """Raise `ApiError` 400 unless the model makes embeddings, or text if not `embeds`."""
        refusal = self._embedding_refusal
        if embeds != bool(refusal):
            return
        does = "makes embeddings: it generates no text"
        if embeds:
            does = f"generates text: {refusal}, and --is-embedding is not set"
        message = f"the model {self.model_name!r} {does}"
        raise ApiError(400, message, param="model", code="unsupported_task")

    def check_open(self) -> None:
        """Raise an error that becomes a 503 if the server takes no new work now."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        self.check_live()

    def check_live(self) -> None:
        """Raise an error that becomes a 503 if the engine has ended, or its process is silent."""
        self.frontend.check_alive()
        self.health.check()

    def check_ready(self) -> None:
        """Raise an error that becomes a 503 if the server takes no new work, or steps fail."""
        self.check_open()
        count = self.engine_info.get("failed_steps", 0)
        if count >= _UNREADY_STEP_FAILURES:
            text = f"the last {count} steps failed on the device; the engine tries it again"
            raise ApiError(503, text, code="steps_fail")


def references_of(request: Request) -> References:
    refs = request.app.state.references
    assert isinstance(refs, References)
    return refs
