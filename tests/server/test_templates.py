"""What the chat template can write is found at the start, and decides every prompt."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_jax.server import text_pool
from sgl_jax.server.text_pool import TextPool
from sgl_jax.text.template_abilities import TemplateAbilities
from sgl_jax.text.tokenizer import Tokenizer
from sgl_jax.text.worker_process import TextWorkers
from tests.server.conftest import Rig, serving, text_workers
from tests.server.server_process import SCRIPTED, running_server
from tests.server.test_text_pool import LOOP
from tests.support.long import long_but
from tests.support.tokenizers import byte_level, save
from tests.text.test_template_abilities import FAMILIES

pytestmark = pytest.mark.anyio

GUARDED = FAMILIES["only the first may be a system message (Qwen 3.5)"].template
PARTS = FAMILIES["strings and lists are contents (Qwen 2.5 VL)"].template
COPIED = FAMILIES["any role is copied (ChatML, Llama 3)"].template


def with_template(folder: Path, template: str) -> Path:
    save(byte_level(), folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_abilities_are_logged_and_told_from_the_start(tmp_path: Path) -> None:
    folder = with_template(tmp_path / "model", GUARDED)
    with running_server(SCRIPTED, folder) as server:
        server.wait_ready()
        told = httpx.get(f"{server.url}/get_server_info").json()["template_abilities"]
        (line,) = (line for line in server.printed if "chat template: " in line)
        assert json.loads(line.partition("chat template: ")[2]) == told
        assert told["system"] == "first"
        said = [{"role": role, "content": role} for role in ("system", "developer", "user")]
        body = {"messages": [*said, said[0]], "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200


async def test_a_template_that_loops_is_taken_for_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(text_pool, "_PROBE_S", 1.0)
    template = tmp_path / "loop.jinja"
    template.write_text("{% if messages | length > 2 %}" + LOOP + "{% endif %}" + COPIED)
    workers = TextWorkers(str(save(byte_level(), tmp_path / "model")), str(template))
    pool = TextPool(workers)
    pool.start()
    with caplog.at_level(logging.WARNING):
        await pool.probe()
    assert pool.abilities == TemplateAbilities()
    assert "the chat template and the tokenizer took longer than 1 s" in caplog.text
    await pool.close()
    workers.close()


SPOKEN = {
    "/v1/chat/completions": ("messages", "max_tokens", "text"),
    "/v1/responses": ("input", "max_output_tokens", "input_text"),
    "/v1/messages": ("messages", "max_tokens", "text"),
}


@pytest.mark.parametrize(
    ("template", "told"), [(COPIED, "<user>a\nb<user>c"), (PARTS, "<user>ab<user>c")]
)
@pytest.mark.parametrize("route", long_but(SPOKEN, "/v1/messages"))
async def test_texts_of_a_message_are_parts_where_the_template_takes_them(
    route: str, template: str, told: str, tmp_path: Path
) -> None:
    folder = with_template(tmp_path / "model", template)
    messages, limit, kind = SPOKEN[route]
    said: list[Any] = [
        {"role": "user", "content": [{"type": kind, "text": text} for text in texts]}
        for texts in ("ab", "c")
    ]
    async with serving(folder, Tokenizer.load(str(folder))) as rig:
        answer = await rig.http.post(route, json={"model": "default", messages: said, limit: 1})
        assert answer.status_code == 200, answer.text
        assert prompt_of(rig) == told
    text_workers(folder).close()


def prompt_of(rig: Rig) -> str:
    (ids,) = (m.input_ids for m in rig.engine.seen if hasattr(m, "input_ids"))
    return rig.front.tokenizer.decode(ids, skip_special_tokens=False)


async def test_results_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    folder = with_template(
        tmp_path / "model", FAMILIES["there is no system message (Gemma 2)"].template
    )
    result = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    async with serving(folder, Tokenizer.load(str(folder))) as rig:
        body = {"messages": [{"role": "user", "content": "a"}, result]}
        answer = await rig.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "does not write results of tools" in answer.json()["error"]["message"]
    text_workers(folder).close()
