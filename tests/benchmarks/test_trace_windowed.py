"""A windowed model's tree finds about what one finds whose layers keep everything, or more."""

import pytest

from benchmarks.trace.__main__ import main
from benchmarks.trace.windowed import GEMMA_3, GPT_OSS, LayerMix, windowed_hit_rates
from sgl_jax.bench.trace.reading import BLOCK_TOKENS, TracedRequest, read_trace
from tests.bench.traced import EXCERPT
from tests.mem_cache.cache_loads import branches, conversations, system_prompts
from tests.support.long import long

# By default one: groups in one pool.
MIXES = [
    pytest.param(GPT_OSS, id="gpt-oss"),
    pytest.param(GEMMA_3, id="gemma-3", marks=pytest.mark.long),
]
LOADS = {"system prompts": system_prompts, "conversations": conversations, "branches": branches}


def load(name: str) -> list[TracedRequest]:
    """A page of the load is a block here."""
    prompts = LOADS[name]()[:300]
    return [TracedRequest(0, BLOCK_TOKENS * len(pages), 1, tuple(pages)) for pages in prompts]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", LOADS)
def test_windows_lose_no_more_than_a_twentieth_in_the_same_memory(name: str, mix: LayerMix) -> None:
    rates = windowed_hit_rates(load(name), 100, mix, page_size=BLOCK_TOKENS, policy="adaptive")
    assert rates.full_alone > 0.1
    assert rates.windowed >= 0.95 * rates.full_alone


@pytest.mark.parametrize("mix", long(*MIXES))
def test_windows_serve_more_of_recorded_traffic_in_the_same_memory(mix: LayerMix) -> None:
    trace = read_trace(EXCERPT)
    rates = windowed_hit_rates(trace, 300, mix, page_size=BLOCK_TOKENS, policy="adaptive")
    assert rates.windowed >= rates.full_alone > 0


def test_the_command_prints_both_mixes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-requests", "20", "--capacity-blocks", "100"]
    assert main(["windows", str(EXCERPT), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[3:]] == ["gpt-oss", "Gemma 3 27B"]
    assert main(["windows", str(EXCERPT), "--page-size", "48"]) == 2
    assert "must divide 512" in capsys.readouterr().err
