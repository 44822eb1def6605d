"""The page at `/` in headless Chromium, on a server whose model repeats the message."""

import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.browser import CHROMIUM, Tab, browser_tab
from tests.server.server_process import SCRIPTED, running_server

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]
IS_IDLE = "document.getElementById('stop').disabled"
MESSAGES = "[...document.querySelectorAll('article p')].map((p) => p.textContent)"


@contextlib.asynccontextmanager
async def chat_page(model: Path, *flags: str) -> AsyncIterator[Tab]:
    """The page of a new server, with a token each 20 ms."""
    flags = ("--random-seed", "20", "--context-length", "2048", *flags)
    with running_server(SCRIPTED, model, *flags) as server:
        async with browser_tab() as tab:
            await tab.open(server.wait_ready().url + "/")
            yield tab


async def click(tab: Tab, name: str) -> None:
    await tab.value(f"document.getElementById('{name}').click()")


async def test_a_conversation_is_streamed_measured_stopped_and_reset(model_folder: Path) -> None:
    markup = "<img src=x onerror=alert(1)> <b>bold</b>"
    async with chat_page(model_folder) as tab:
        await tab.type(markup + "\n")
        await tab.until(f"{IS_IDLE} && ({MESSAGES}).length === 2")
        assert await tab.value(MESSAGES) == [markup, markup]
        assert await tab.value("document.querySelectorAll('#log img, #log b').length") == 0
        figures = await tab.value("[...document.querySelectorAll('dd')].map((d) => d.textContent)")
        first, rate, num_tokens, num_prompt, num_cached = figures
        assert first.endswith(" ms")
        assert 10 < float(rate) < 60
        assert int(num_cached) == int(num_prompt) // 2
        bars = "document.querySelectorAll('#chart rect').length"
        assert await tab.value(bars) == int(num_tokens)
        assert await tab.value("document.querySelectorAll('#chart rect.first').length") == 1

        await tab.type("on and on " * 100 + "\n")
        await tab.until(f"({MESSAGES})[3]?.length > 20")
        await click(tab, "stop")
        await tab.until(IS_IDLE)
        assert 20 < len((await tab.value(MESSAGES))[3]) < 900

        await click(tab, "reset")
        await tab.type("Again.\n")
        await tab.until(f"{IS_IDLE} && ({MESSAGES}).length === 2")
        assert await tab.value(MESSAGES) == ["Again.", "Again."]
        assert tab.problems == []


async def test_a_refusal_is_shown_and_the_message_stays(model_folder: Path) -> None:
    async with chat_page(model_folder) as tab:
        await tab.value("document.getElementById('max-tokens').value = 10 ** 9")
        await tab.type("Hello.\n")
        await tab.until(f"{IS_IDLE} && !document.getElementById('notice').hidden")
        assert "max_tokens" in await tab.value("document.getElementById('notice').textContent")
        assert await tab.value("document.getElementById('message').value") == "Hello."
        assert await tab.value(MESSAGES) == []


async def test_a_key_is_asked_for_when_the_server_needs_one(model_folder: Path) -> None:
    async with chat_page(model_folder, "--api-key", "hush") as tab:
        await tab.until("!document.getElementById('key-form').hidden")
        await tab.type("wrong\n")
        await tab.until("!document.getElementById('notice').hidden")
        await tab.until("!document.getElementById('key-form').hidden")
        await tab.type("hush\n")
        await tab.until("document.getElementById('model').textContent !== ''")
        await tab.type("Hello.\n")
        await tab.until(f"{IS_IDLE} && ({MESSAGES}).length === 2")
        assert await tab.value("JSON.stringify(localStorage)") == "{}"


async def test_a_model_without_a_chat_template_continues_the_text(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    async with chat_page(folder) as tab:
        await tab.value("document.getElementById('max-tokens').value = 6")
        await tab.type("Once upon\n")
        await tab.until(f"{IS_IDLE} && ({MESSAGES}).length === 2")
        assert (await tab.value(MESSAGES))[0] == "Once upon"
        assert "no chat template" in await tab.value(
            "document.getElementById('notice').textContent"
        )
