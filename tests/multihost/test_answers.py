"""An engine over several hosts answers as one host with the same ranks and chips does."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.golden_server import golden
from tests.multihost.live_group import end, generate, live_group, model_folder
from tests.multihost.workload import run_workload

RETRACTS = ("--test-retract", "--test-retract-interval", "3")
DRAFTS = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "2")
DRAFT_LAYER = ("--speculative-algorithm", "MTP", "--speculative-num-draft-tokens", "2")
HOST_MEMORY = ("--enable-hierarchical-cache", "--hicache-fetch-policy", "always")


class Case(NamedTuple):
    """A model, hosts, and the mesh over them."""

    model: str
    num_hosts: int
    dp_size: int
    tp_size: int
    flags: tuple[str, ...] = RETRACTS
    has_text: bool = False
    has_experts: bool = False


CASES = {
    "dp over hosts": Case("llama", 2, 2, 1),
    "dp over hosts: text, drafts": Case("demo", 2, 2, 1, (*RETRACTS, *DRAFTS), has_text=True),
    "dp x tp, 4 hosts": Case("llama", 4, 2, 2, (*RETRACTS, *DRAFTS)),
    "windows, tp": Case("gpt_oss", 2, 1, 2),
    "states, dp": Case("qwen3_next", 2, 2, 1, (*RETRACTS, *DRAFTS)),
    "a draft layer, tp: text": Case(
        *("demo_hybrid", 2, 1, 2), (*RETRACTS, *DRAFT_LAYER), has_text=True
    ),
    "latents, experts of all chips": Case("deepseek_v3", 2, 2, 1, (*RETRACTS, "--ep-size", "2")),
    "host's memory, dp x tp": Case("llama", 2, 2, 2, (*RETRACTS, *HOST_MEMORY)),
    "experts of all chips": Case(
        *("qwen3_moe", 2, 2, 1),
        # No retracts: experts of tokens that are computed again count twice.
        ("--ep-size", "2", "--expert-distribution-recorder-mode", "stat"),
        has_experts=True,
    ),
}


def test_two_hosts_generate_the_golden_tokens(tmp_path: Path) -> None:
    data = golden("llama")
    prompt, greedy = data["prompt"].tolist(), data["greedy"].tolist()
    with live_group(tmp_path, 2, "--dp-size", "2") as hosts:
        answers = generate(hosts[0].url, [prompt] * 2, max_new_tokens=len(greedy))
        assert [answer["output_ids"] for answer in answers] == [greedy] * 2
        assert end(hosts, rank=1) == [0, 0], hosts[1].output[-2000:]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_every_mesh_over_hosts_answers_as_one_host(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    other = altered_weights(case.model, tmp_path / "other")
    one, several = (answers_of(case, num, tmp_path, other) for num in (1, case.num_hosts))
    assert_equal(several, one)
    assert several["kept"] != several["updated"]
    assert several["retracts"] == ("--test-retract" in case.flags)


def answers_of(case: Case, num_hosts: int, folder: Path, other: Path) -> Any:
    own = folder / f"{num_hosts}"
    own.mkdir()
    mesh = ("--dp-size", str(case.dp_size), "--tp-size", str(case.tp_size))
    with live_group(own, num_hosts, *mesh, *case.flags, model=case.model) as hosts:
        answers = run_workload(
            hosts[0].url, other, has_text=case.has_text, has_experts=case.has_experts
        )
        assert end(hosts, rank=num_hosts - 1) == [0] * num_hosts, hosts[-1].output[-2000:]
    return answers


def altered_weights(model: str, folder: Path) -> Path:
    """The model with other numbers in one matrix."""
    folder.mkdir()
    for file in model_folder(model).iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model_folder(model) / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("o_proj.weight"))
    tensors[name] = np.ascontiguousarray(tensors[name][::-1])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    """Tokens and counts are equal, log-probabilities within float32's rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for i, (own, its) in enumerate(zip(one, other, strict=True)):
            assert_equal(own, its, f"{path}/{i}")
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-3), path
    else:
        assert one == other, path
