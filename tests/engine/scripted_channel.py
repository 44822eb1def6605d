"""The frontend's end of the line as a script: what it sends, turn by turn, and what it heard."""

from collections.abc import Iterator

from sgl_jax.core.engine_messages import (
    EngineMessage,
    FinishReason,
    Heartbeat,
    OutputBatch,
)
from sgl_jax.core.messages import FrontMessage, Shutdown


class ScriptedChannel:
    """Each poll answers what the script yields next; when it ends, `Shutdown`."""

    def __init__(self, script: Iterator[list[FrontMessage]]) -> None:
        self._script = script
        self.sent: list[EngineMessage] = []

    def poll(self, timeout_s: float) -> list[FrontMessage]:
        return next(self._script, [Shutdown()])

    def send(self, message: EngineMessage) -> None:
        if not isinstance(message, Heartbeat):
            self.sent.append(message)

    def tokens(self) -> dict[str, list[int]]:
        """What each request gained."""
        found: dict[str, list[int]] = {}
        for batch in self.sent:
            if isinstance(batch, OutputBatch):
                for rid, token in zip(batch.rids, batch.token_ids(), strict=True):
                    found.setdefault(rid, []).append(token)
                for output in batch.outputs:
                    found.setdefault(output.rid, []).extend(output.token_ids)
        return found

    def ends(self) -> dict[str, FinishReason]:
        """How each request ended; each must have ended once."""
        found: dict[str, FinishReason] = {}
        for batch in self.sent:
            for output in batch.outputs if isinstance(batch, OutputBatch) else []:
                if output.finish is not None:
                    assert output.rid not in found, f"{output.rid} ended twice"
                    found[output.rid] = output.finish
        return found
