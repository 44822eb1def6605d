"""Other people's benchmarks and evaluations, as their commands run, on a server of the model.

Their packages cannot be installed beside each other, so each is looked for on the PATH: install it
in a virtual environment of its own, and put that one's `bin` at the end of the PATH.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.live_server import DEMO, LiveServer, live_server

pytestmark = pytest.mark.long

SGLANG = "sglang==0.5.23"
QUESTIONS = [f"What is {left} + {right}?" for left in (12, 30) for right in (25, 41)]
SUMS = [f"{left} + {right} = {left + right}." for left in (12, 30) for right in (25, 41)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("benches"), "--check-memory", "busy") as server:
        yield server
        server.assert_nothing_leaked()


def run(folder: Path, command: list[str], **environment: str) -> str:
    """What a command prints, which must end well."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def command(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name} on the PATH")
    return found


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], lines: str) -> None:
    """A task of lm-eval, of which nothing has to be downloaded."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
    (folder / f"{name}.yaml").write_text(f"{head}test_split: test\n{lines}")


def lm_eval(folder: Path, server: LiveServer, model: str, route: str, *more: str) -> Any:
    """The result of the one task in `folder`."""
    (task,) = (file.stem for file in folder.glob("*.yaml"))
    settings = f"model=demo,base_url={server.url}{route},num_concurrent=4"
    arguments = ["run", "--model", model, "--tasks", task, "--include_path", str(folder)]
    out = ["--output_path", str(folder / "out.json"), *more]
    if "chat" not in model:
        settings += ",tokenizer_backend=remote"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    run(folder, [command("lm_eval"), *arguments, "--model_args", settings, *out], **offline)
    (results,) = folder.rglob("out*.json")
    return json.loads(results.read_text())["results"][task]


def test_lm_eval_asks_how_likely_choices_are(server: LiveServer, tmp_path: Path) -> None:
    """Tokens come from the server, too: /tokenizer_info, /tokenize, /detokenize."""
    rows = [
        {
            "question": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
            "choices": [answer, answer.replace("= ", "= 1")],
        }
        for question, answer in zip(QUESTIONS, SUMS, strict=True)
    ]
    lines = (
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: 0\ntarget_delimiter: ""\n'
        "metric_list: [{metric: acc}]\n"
    )
    write_task(tmp_path, "tiny_choices", rows, lines)
    result = lm_eval(tmp_path, server, "local-completions", "/v1/completions")
    assert result["acc,none"] == 1.0


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_lm_eval_has_answers_generated(server: LiveServer, tmp_path: Path, is_chat: bool) -> None:
    template = "{}" if is_chat else "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    rows = [
        {"question": template.format(question), "answer": answer}
        for question, answer in zip(QUESTIONS, SUMS, strict=True)
    ]
    lines = (
        'output_type: generate_until\ndoc_to_text: "{{question}}"\n'
        'doc_to_target: "{{answer}}"\ntarget_delimiter: ""\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 32}\n'
        "metric_list: [{metric: exact_match}]\n"
    )
    write_task(tmp_path, "tiny_sums", rows, lines)
    if is_chat:
        route = "/v1/chat/completions"
        result = lm_eval(tmp_path, server, "local-chat-completions", route, "--apply_chat_template")
    else:
        result = lm_eval(tmp_path, server, "local-completions", "/v1/completions")
    assert result["exact_match,none"] == 1.0


def test_guidellm_measures(server: LiveServer, tmp_path: Path) -> None:
    rows = [{"prompt": question, "output_tokens_count": 16} for question in QUESTIONS * 2]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        *("--backend", f"kind=openai_http,target={server.url}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=8"),
        *("--data", "kind=json_file,path=prompts.jsonl"),
        *("--tokenizer", f"kind=hf_auto,model={DEMO}"),
        *("--output", "kind=json,path=out.json", "--disable-progress"),
    ]
    run(tmp_path, [command("guidellm"), "run", *arguments])
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0)


def test_aiperf_measures(server: LiveServer, tmp_path: Path) -> None:
    arguments = [
        *("--model", "demo", "--url", server.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(DEMO), "--concurrency", "2", "--request-count", "8"),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"),
        *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", "out", "--ui", "none"),
    ]
    run(tmp_path, [command("aiperf"), "profile", *arguments])
    measured = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == 8


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SGLang's wheel, unpacked: its bench is not to be had by itself."""
    for module in ("orjson", "pybase64", "PIL", "datasets", "requests"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("sglang")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), SGLANG]
    subprocess.run(pip, check=True, timeout=300)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(folder, names)
    return folder


@pytest.mark.parametrize(
    "backend",
    [
        *("sglang", "sglang-native", "sglang-oai", "sglang-oai-chat"),
        *("vllm", "vllm-chat", "lmdeploy", "lmdeploy-chat"),
    ],
)
def test_sglangs_bench_serving_measures(
    server: LiveServer, wheel: Path, tmp_path: Path, backend: str
) -> None:
    arguments = [
        *("--backend", backend, "--base-url", server.url, "--model", "demo"),
        *("--tokenizer", str(DEMO), "--dataset-name", "random-ids", "--num-prompts", "8"),
        *("--random-input-len", "32", "--random-output-len", "16", "--random-range-ratio", "1.0"),
        *("--output-file", "out.jsonl"),
    ]
    script = str(Path(__file__).parent / "sglang_bench.py")
    run(tmp_path, [sys.executable, script, str(wheel), *arguments])
    measured = json.loads((tmp_path / "out.jsonl").read_text())
    assert measured["completed"] == 8
    assert measured["total_output_tokens"] == 8 * 16
