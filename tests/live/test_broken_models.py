"""A model that cannot be served is refused when it is opened: one line, and which file."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from tests.live.live_server import DEMO
from tests.server.server_process import REAL, running_server

FLAGS = ("--device", "cpu", "--context-length", "128", "--max-running-requests", "2")
Spoil = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demonstration model, to be spoiled."""
    return shutil.copytree(DEMO, tmp_path / "model")


def in_json(name: str, **changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return spoil


def write(name: str, content: str) -> Spoil:
    return lambda folder: (folder / name).write_text(content)


def with_a_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][1, 1] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def cut_off(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


SPOILED: Mapping[str, tuple[Spoil, str]] = {
    "eos id": (in_json("config.json", eos_token_id=10**12), "config.json': eos_token_id"),
    "generation": (in_json("generation_config.json", eos_token_id=[768]), "got 768"),
    "wrong type": (in_json("config.json", rms_norm_eps="x"), "rms_norm_eps must be a positive"),
    "tokenizer": (write("tokenizer.json", "[1]"), "cannot read a tokenizer from"),
    "template": (write("chat_template.jinja", "{% for %}"), "the chat template in"),
    "weights": (cut_off, "model.safetensors"),
    "nan": (with_a_nan, "tensor 'model.layers.2.mlp.up_proj.weight' in"),
}
QUICK = ("eos id",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in SPOILED],
)
def test_a_broken_model_is_refused_with_one_line(folder: Path, name: str) -> None:
    spoil, message = SPOILED[name]
    spoil(folder)
    with running_server(REAL, folder, *FLAGS) as server:
        assert server.wait_exit(120) == 1
        said = [line for line in server.printed if "cannot serve" in line]
        assert len(said) == 1, server.printed
        assert message in said[0]
        assert str(folder) in said[0]
        assert not any("Traceback" in line for line in server.printed), server.printed
        assert not server.left_behind()


@pytest.mark.long
def test_a_model_without_a_tokenizer_serves_token_ids(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    with running_server(REAL, folder, *FLAGS, "--warmup", "none") as server:
        server.wait_ready(120)
        sampling = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
        ids = {"input_ids": [5, 6, 7], "sampling_params": sampling}
        answer = httpx.post(f"{server.url}/generate", json=ids, timeout=60)
        assert answer.status_code == 200
        assert len(answer.json()["output_ids"]) == 3
        refused = httpx.post(f"{server.url}/generate", json={"text": "hello"}, timeout=60)
        assert refused.status_code == 400
        assert "no tokenizer" in refused.json()["error"]["message"]
