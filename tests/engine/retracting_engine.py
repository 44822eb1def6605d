"""A small engine that retracts a request every third step and checks its memory all the time."""

from pathlib import Path
from typing import Any

from sgl_jax.engine.offline import Engine


def retracting_engine(folder: Path, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "warmup": "none",
        "check_memory": "busy",
        "page_size": 4,
        "max_total_tokens": 480,
        "max_running_requests": 4,
        "chunked_prefill_size": 16,
        "test_retract": True,
        "test_retract_interval": 3,
    }
    return Engine(str(folder), **defaults | settings)
