"""Errors shared by several packages: invalid requests and failures of the engine."""

from sgl_jax.core.exit_codes import FAILED


class InvalidRequestError(ValueError):
    """A request that can never be served as it is; the message states the allowed values.

    `param` is the client's name of the invalid field, if it is a single field. `code` is a
    machine-readable reason. The HTTP layer sends all three with status 400.
    """

    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthError(InvalidRequestError):
    """Prompt and output together are too long. Clients match this code and message."""

    code = "context_length_exceeded"

    def __init__(self, sizes: str, most: int, param: str, *, is_session: bool = False) -> None:
        """Name in `sizes` the lengths that exceed `most` tokens of the model or session."""
        holder, whose = ("the session", "its") if is_session else ("one request", "this model's")
        super().__init__(
            f"{sizes} exceed the {most} tokens that {holder} can hold, the maximum allowed length; "
            f"{whose} maximum context length is {most} tokens",
            param,
        )


class GroupError(RuntimeError):
    """The hosts of one engine did not all start, cannot serve together, or lost one of them."""


class StepsFailedError(RuntimeError):
    """Too many steps failed in a row: the device does not work."""


class EngineDeadError(RuntimeError):
    """The engine process has ended; no further request can be served."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        """Create the error; the server then ends with `exit_code`."""
        super().__init__(message)
        self.exit_code = exit_code


class EngineStuckError(RuntimeError):
    """The engine process runs but sends nothing; it may recover."""


class QueueFullError(RuntimeError):
    """Too many requests wait for the engine; the client may try again later."""


class TenantQueueFullError(RuntimeError):
    """Too many requests of one tenant wait; the client may try again later."""


class ShuttingDownError(RuntimeError):
    """The server is shutting down, and its time limit for running requests has passed."""
