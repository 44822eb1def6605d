"""Log lines of a process, as text or JSON, with the id of the HTTP request they concern."""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

# Id of the request served by this task or thread, or "".
request_id: ContextVar[str] = ContextVar("request_id", default="")


class TextLines(logging.Formatter):
    """Time, level, logger, message, and the request's id if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(of_request)s")

    def format(self, record: logging.LogRecord) -> str:
        name = request_id.get()
        record.of_request = f" [{name}]" if name else ""
        return super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object per line: time (ISO 8601, UTC), level, logger, message, and request_id and
    exception if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := request_id.get():
            line["request_id"] = name
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_terminal(level: str, form: str) -> None:
    """Log to standard error in `form` "text" or "json". `level` applies to this package; libraries
    log warnings and errors only, or only errors if `level` is "error"."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    # Importing orbax configures logging, so its handlers are replaced.
    least = "ERROR" if level == "error" else "WARNING"
    logging.basicConfig(level=least, handlers=[handler], force=True)
    logging.getLogger("sgl_jax").setLevel(level.upper())
