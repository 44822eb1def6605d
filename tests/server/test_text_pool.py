"""Workers: right ids, an end to everything, and another one when one is gone."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.server.errors import ApiError
from sgl_jax.server.requests import pieces_of
from sgl_jax.server.text_pool import Ids, TextPool
from sgl_jax.text.jobs import EncodeChat, EncodeTexts
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.worker_process import TextWorkers
from tests.support.tokenizers import TEMPLATE

pytestmark = pytest.mark.anyio

TIMEOUT_S = 1.0
MAX_CHARS, MAX_TOKENS = 1000, 256
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TRICKY = (
    "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}"
    "{% if messages[0].content == 'fill' %}{{ 'a' * 10**11 }}{% endif %}"
    "{% if messages[0].content == 'grow' %}{{ 'a' * 2000 }}{% endif %}"
) + TEMPLATE

Pools = Callable[[], AbstractAsyncContextManager[TextPool]]


@pytest.fixture(scope="module")
def tricky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "tricky.jinja"
    path.write_text(TRICKY)
    return path


@pytest.fixture(scope="module")
def workers(model_folder: Path, tricky: Path) -> Any:
    workers = TextWorkers(str(model_folder), str(tricky))
    yield workers
    workers.close()


@pytest.fixture
def pool(workers: TextWorkers) -> Pools:
    @asynccontextmanager
    async def make() -> AsyncIterator[TextPool]:
        pool = TextPool(workers)
        pool.start()
        try:
            await encode(pool, ["started"])
            yield pool
        finally:
            await pool.close()

    return make


async def chat(pool: TextPool, content: str, client: str = "one", **arguments: Any) -> list[int]:
    messages = msgspec.json.encode([{"role": "user", "content": content}])
    template_args = msgspec.json.encode(arguments)
    job = EncodeChat(
        messages,
        b"null",
        False,
        template_args,
        MAX_CHARS,
        MAX_TOKENS,
        TIMEOUT_S,
    )
    (ids,) = await pool.run(client, [job])
    return ids.tolist()


async def encode(pool: TextPool, texts: list[str]) -> list[Ids]:
    return await pool.run("one", [EncodeTexts(piece, TIMEOUT_S) for piece in pieces_of(texts)])


async def test_ids_are_those_of_the_tokenizer(pool: Pools, tokenizer: Tokenizer) -> None:
    texts = ["hello there " * 20_000, "", "Größe 😀", *["one two"] * 50, "x" * 70_000]
    async with pool() as texts_pool:
        ids = await encode(texts_pool, texts)
        assert [each.tolist() for each in ids] == [tokenizer.encode(text) for text in texts]
        messages = [{"role": "user", "content": "hi"}]
        wanted = tokenizer.apply_chat_template(messages)
        assert await chat(texts_pool, "hi", big=2**80) == wanted
        assert texts_pool.num_open == 0


async def test_a_template_that_loops_ends_and_others_are_served_meanwhile(pool: Pools) -> None:
    async with pool() as texts:
        looping = asyncio.ensure_future(chat(texts, "loop", "slow"))
        start = time.monotonic()
        while not looping.done():
            await chat(texts, "hi", "quick")
        assert time.monotonic() - start >= TIMEOUT_S
        with pytest.raises(ApiError, match="took longer than 1 s") as caught:
            await looping
        assert caught.value.status_code == 503
        assert await chat(texts, "hi", "slow")


async def test_a_template_that_fills_memory_is_refused(pool: Pools) -> None:
    async with pool() as texts:
        with pytest.raises(InvalidRequestError, match="chat template refused"):
            await chat(texts, "fill")
        assert await chat(texts, "hi")


async def test_what_a_template_writes_is_bounded(pool: Pools) -> None:
    async with pool() as texts:
        with pytest.raises(InvalidRequestError, match=f"at most {MAX_CHARS} are taken") as caught:
            await chat(texts, "grow")
        assert caught.value.param == "messages"
        assert caught.value.code == "context_length_exceeded"
        assert f"maximum context length is {MAX_TOKENS} tokens" in str(caught.value)


async def test_workers_that_are_killed_are_replaced(pool: Pools, workers: TextWorkers) -> None:
    async with pool() as texts:
        for _ in range(2):
            assert workers.pid is not None
            parent = psutil.Process(workers.pid)
            for process in (*parent.children(), parent):
                process.kill()
            assert await chat(texts, "hi")


async def test_a_stopped_worker_holds_up_only_its_own_request(
    pool: Pools, workers: TextWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_jax.server.text_pool._GRACE_S", 0.5)
    async with pool() as texts:
        assert workers.pid is not None
        await chat(texts, "hi")
        stopped = psutil.Process(workers.pid).children()
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(ApiError, match="took longer"):
                await chat(texts, "hi")
        finally:
            for process in stopped:
                os.kill(process.pid, signal.SIGKILL)
        assert await chat(texts, "hi")


async def test_a_worker_for_which_there_is_no_memory_fails_its_request_alone(
    pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_memory(worker: object) -> None:
        raise MemoryError

    async with pool() as texts:
        with monkeypatch.context() as patch:
            patch.setattr("sgl_jax.server.text_pool._Worker._connected", no_memory)
            for _ in range(10):  # more often than there are workers
                with pytest.raises(MemoryError):
                    await asyncio.wait_for(encode(texts, ["hello"]), 10)
        assert await chat(texts, "hi")


async def test_work_whose_client_is_gone_is_not_done(pool: Pools) -> None:
    async with pool() as texts:
        waiting = [asyncio.ensure_future(chat(texts, "loop", "gone")) for _ in range(5)]
        await asyncio.sleep(0.1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert texts.num_open == 0
        start = time.monotonic()
        assert await chat(texts, "hi", "gone")
        assert time.monotonic() - start < 2 * TIMEOUT_S  # the one that had begun, not all five


@pytest.mark.long
async def test_no_process_is_left(model_folder: Path) -> None:
    workers = TextWorkers(str(model_folder))
    pool = TextPool(workers)
    pool.start()
    await encode(pool, ["hello"])
    parent = psutil.Process(workers.pid)
    family = [parent, *parent.children()]
    assert len(family) > 1
    await pool.close()
    workers.close()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
