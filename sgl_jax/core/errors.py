"""Errors shared by several packages, and exit codes of a server and of its engine process.

A server's exit code is 0 after a signal and a drain.
"""

FAILED = 1  # the engine or the server failed; the last line of the log has the reason
# For an engine on several hosts, see docs/guide/hosts.md.
GROUP_REFUSED = 70  # the hosts did not all come in time, or their settings or versions differ
HOST_LOST = 71  # another host died, hung or lost the network: start all of them again
KILLED_BY_SIGNAL = 128  # plus the number of a second signal, which ends at once (as in shells)
GROUP_CODES = (GROUP_REFUSED, HOST_LOST)
STEPS_FAILED = 72  # --max-step-failures steps failed in a row: the device does not work
ENGINE_CODES = (*GROUP_CODES, STEPS_FAILED)  # of the engine process, passed on by the server


class InvalidRequestError(ValueError):
    """A request that can never be served as it is; the message states the allowed values.

    `param` is the client's name of the invalid field, if it is a single field. `code` is a
    machine-readable reason. The HTTP layer sends all three with status 400.
    """

    code = "invalid_value"
    status_code = 400

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
