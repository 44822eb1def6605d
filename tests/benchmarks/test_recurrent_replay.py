"""What a cache that keeps few states finds, beside one that keeps them all."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trace.__main__ import main
from benchmarks.trace.recurrent import QWEN3_NEXT, StatesReplay
from tests.mem_cache.cache_loads import (
    EXCERPT,
    Prompt,
    branches,
    conversations,
    long_documents,
    system_prompts,
    tree_search,
)

PAGE = 512
LOADS: dict[str, tuple[Callable[[], list[Prompt]], int]] = {
    "system prompts": (system_prompts, 160),
    "conversations": (conversations, 300),
    "branches": (branches, 300),
    "tree search": (tree_search, 300),
    "long documents": (long_documents, 480),
}


def tokens_of(prompt: Prompt) -> np.ndarray:
    """A page of 512 tokens for each of the load's, and the beginning of a question."""
    return np.append(np.repeat(np.array(prompt, np.int32), PAGE), np.int32(-1))


def found(load: str, share: float | None) -> int:
    """Tokens found with snapshots of `share` of the KV's bytes, or with all states."""
    make, num_pages = LOADS[load]
    prompts = [tokens_of(prompt) for prompt in make()]
    num_snapshots = None if share is None else QWEN3_NEXT.num_snapshots(num_pages * PAGE, share)
    longest = max(map(len, prompts)) + PAGE
    replay = StatesReplay(num_pages, num_snapshots, PAGE, longest, interval=QWEN3_NEXT.interval)
    return replay.serve_all(prompts)


@pytest.mark.parametrize(
    "load", ["system prompts", "conversations", "tree search", "long documents"]
)
def test_snapshots_of_as_many_bytes_as_the_kv_find_nine_tenths(load: str) -> None:
    assert found(load, 1.0) >= 0.9 * found(load, None)


@pytest.mark.long
def test_branches_at_random_pages_find_what_lies_before_the_snapshot_in_front_of_them() -> None:
    """Where a document is left for the first time, only multiples of the interval help."""
    assert found("branches", 1.0) >= 0.45 * found("branches", None)


def test_the_command_prints_shares_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["states", str(EXCERPT), "--num-requests", "40"]
    picture = tmp_path / "states.svg"
    options = ["--capacity-blocks", "300", "--plot", str(picture)]
    assert main([*words, *options, "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["300"]
    assert rates["oracle"] >= rates["by_share"]["1.0"] > 0
    assert "all states" in picture.read_text()
    assert main([*words, "--capacity-blocks", "300"]) == 0
    assert "bytes to KV" in capsys.readouterr().out
    assert main([*words, "--plot", "shares.txt"]) == 2
    assert "--plot must end in one of" in capsys.readouterr().err
