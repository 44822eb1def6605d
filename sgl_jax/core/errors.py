"""Errors that cross rooms: faults of a caller, and failures of the engine."""


class InvalidRequestError(ValueError):
    """A request that can never be served as it stands; the text names the allowed values.

    `param` names the offending field as the client spelled it, or is None when no single
    field is at fault; `code` is a name of the reason that programs can test. The HTTP layer
    answers 400 with all of them.
    """

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthError(InvalidRequestError):
    """Prompt and output are longer than they may be. Clients look for these words and this code."""

    code = "context_length_exceeded"

    def __init__(self, sizes: str, most: int, param: str, *, is_session: bool = False) -> None:
        """`sizes` names the sizes that exceed the `most` tokens of the model, or of the session."""
        holder, whose = ("the session", "its") if is_session else ("one request", "this model's")
        super().__init__(
            f"{sizes} exceed the {most} tokens that {holder} can hold, the maximum allowed length; "
            f"{whose} maximum context length is {most} tokens",
            param,
        )


class EngineDeadError(RuntimeError):
    """The scheduling process has ended; nothing more can be served."""


class EngineStuckError(RuntimeError):
    """The scheduling process is there and sends nothing; it may go on later."""


class QueueFullError(RuntimeError):
    """So much waits for the engine that no more is taken; it may be tried again later."""


class TenantQueueFullError(RuntimeError):
    """So much of one tenant waits that no more of it is taken; it may be tried again later."""


class ShuttingDownError(RuntimeError):
    """The server is shutting down, and the time that running requests get for it was up."""
