"""A real engine loop and scheduler behind the routes, on the executor of the content oracle."""

from functools import partial
from typing import Any

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import Channel
from sgl_jax.engine.loop import core as core_module
from sgl_jax.engine.loop.core import EngineCore
from tests.engine.test_memory_defects import OracleModelExecutor
from tests.scheduler.driver import make_sizes
from tests.support.oracle_executor import OracleExecutor

VOCAB_SIZE = 512
SIZES = make_sizes(
    num_pages=64, num_rows=5, max_chunk_tokens=32, max_context_len=64, vocab_size=VOCAB_SIZE
)


class SizedExecutor(OracleModelExecutor):
    """Of these sizes, with the facts that a frontend needs."""

    def __init__(self, args: ServerArgs, progress: Progress, sizes: EngineSizes = SIZES) -> None:
        super().__init__(args, progress)
        self.sizes: EngineSizes = sizes
        self.oracle = OracleExecutor(sizes)
        self.info = {
            "vocab_size": sizes.vocab_size,
            "max_context_len": sizes.max_context_len,
            "dp_size": sizes.dp_size,
            "page_size": sizes.page_size,
            "num_layers": 1,
            "experts_per_token": 0,
            "hidden_size": 0,
            "eos_token_ids": [],
            "image_slots": sizes.image_slots,
            "max_images": sizes.max_images,
            "max_image_tokens": sizes.max_image_tokens,
            "image_token_side": sizes.image_token_side,
            "images": None,
            "model_path": "oracle",
            "settings": {},
        }


class CoreEngine:
    """Lets `serving` run an engine's core in place of a scripted engine."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.running: dict[str, Any] = {}

    @property
    def info(self) -> dict[str, Any]:
        return self.core.info

    @property
    def stopped(self) -> bool:
        return self.core._is_shutting_down

    @stopped.setter
    def stopped(self, stopped: bool) -> None:
        self.core._is_shutting_down = stopped

    def run(self, channel: Channel) -> None:
        self.core.run(channel)


def oracle_engine(monkeypatch: Any, sizes: EngineSizes = SIZES, **settings: Any) -> CoreEngine:
    """Make an engine whose executor is the oracle."""
    monkeypatch.setattr(core_module, "ModelExecutor", partial(SizedExecutor, sizes=sizes))
    return CoreEngine(EngineCore(ServerArgs(model_path="none", check_memory="busy", **settings)))
