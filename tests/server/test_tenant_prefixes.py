"""Isolated tenants on a real model: no prefix crosses keys, through host, store and restart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.text.tokenizer import Tokenizer
from tests.server.conftest import Rig, serving
from tests.server.oracle_engine import CoreEngine
from tests.support.waiting import meanwhile_until

pytestmark = pytest.mark.anyio
DEMO = str(Path(__file__).parents[2] / "models" / "demo")
PROMPT, OTHER = list(range(300, 340)), list(range(400, 440))
WHOLE_PAGES = 32
KEYS = {"annika": "a1", "bertram": "b2", "clara": "c3"}


def demo_engine(**settings: Any) -> CoreEngine:
    """Make the engine of the demonstration model, as `serving` takes it."""
    args = ServerArgs(
        model_path=DEMO,
        device="cpu",
        context_length=128,
        max_running_requests=2,
        warmup="none",
        check_memory="busy",
        **settings,
    )
    return CoreEngine(EngineCore(args))


@asynccontextmanager
async def served(folder: Path, settings: dict[str, Any]) -> AsyncIterator[Rig]:
    """The demonstration model for three keys."""
    keys = folder / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    own: dict[str, Any] = {"api_key_file": str(keys), "isolate_tenants": True} | settings
    engine = await asyncio.to_thread(lambda: demo_engine(**own))
    tokenizer = Tokenizer.load(DEMO)
    async with serving(Path(DEMO), tokenizer, engine=engine, **own) as rig:
        offload = engine.core.scheduler.offload
        await meanwhile_until(lambda: not offload.is_restoring, "the cache is restored")
        yield rig
        await meanwhile_until(
            lambda: not (offload.is_moving_out or offload.is_storing), "the store has all"
        )


async def cached(rig: Rig, name: str, prompt: list[int], **fields: Any) -> int:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    answer = await rig.http.post("/generate", json=body | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["meta_info"]["cached_tokens"])


@pytest.mark.long
async def test_a_prefix_of_one_key_is_none_of_anothers_after_a_restart_from_the_store(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "page_size": 16,
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "file",
        "hicache_fetch_policy": "always",
        "hicache_storage_prefetch_policy": "wait_complete",
        "restore_cache": str(tmp_path / "cache"),
        "save_cache_interval": 0.0,
    }
    async with served(tmp_path, settings) as rig:
        for name, prompt in (("annika", PROMPT), ("bertram", OTHER)):
            assert await cached(rig, name, prompt) == 0
            assert await cached(rig, name, prompt) == WHOLE_PAGES
        assert await cached(rig, "annika", PROMPT, cache_salt="red") == 0
    async with served(tmp_path, settings) as rig:
        assert await cached(rig, "clara", PROMPT) == 0
        assert await cached(rig, "clara", PROMPT, cache_salt="annika:") == 0
        assert await cached(rig, "bertram", PROMPT) == 0
        assert await cached(rig, "bertram", PROMPT, cache_salt="red") == 0
        assert await cached(rig, "annika", OTHER) == 0
        assert await cached(rig, "annika", PROMPT) == WHOLE_PAGES
        assert await cached(rig, "annika", PROMPT, cache_salt="red") == WHOLE_PAGES
        assert await cached(rig, "bertram", OTHER) == WHOLE_PAGES
