"""The numbers of requests in docs/measurements/planning.md are those that the planner counts."""

import re

import pytest

from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.memory import plan_memory, requests_without_sharing, requests_without_windows
from sgl_jax.planner.topology import GIB, Topology, has_tpu_compiler
from tests.support.documented import ROOT

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(), reason="libtpu (sgl-jax[tpu]) is not installed"
)

PAGE = (ROOT / "docs" / "measurements" / "planning.md").read_text()
WITH_FULL_TOKENS = "... with `--swa-full-tokens-ratio 0.1`"
NAMES = {"Gemma 3 27B": "gemma-3-27b"}
NAMES |= {own: f"gemma-4-{own.lower()}" for own in ("E2B", "E4B", "26B-A4B", "31B")}


def rows(title):
    """The load of a section's command, and its table's lines by their first cell."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    load = re.search(r"--input-len \d+ --output-len \d+", section)[0].split()
    lines = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    return load, [[cell.strip() for cell in line.split("|")] for line in lines]


def planned(name, slice_name, load):
    """A request of one rank on a whole slice, and its memory."""
    model, num_devices = NAMES.get(name, name), Topology.parse(slice_name).num_devices
    words = ["--model-path", model, "--topology", slice_name, "--tp-size", str(num_devices)]
    request = parse_plan_request([*words, *load])
    return request, plan_memory(request)


LOAD, LINES = rows("Windows")
STARTS = [number for number, line in enumerate(LINES) if line[0].endswith(", slice")]


@pytest.mark.parametrize("start", STARTS, ids=lambda start: LINES[start][0])
def test_requests_with_and_without_windows(start):
    (name, *slices), full, without, ratio = LINES[start : start + 4]
    assert [line[0] for line in (full, without, ratio)] == [
        "... requests at once",
        "... if every layer kept all",
        "... ratio",
    ]
    for column, own in enumerate(slices, 1):
        request, memory = planned(name.removesuffix(", slice"), own, LOAD)
        every = requests_without_windows(request, memory)
        assert (int(full[column]), int(without[column])) == (memory.num_requests, every)
        assert float(ratio[column]) == pytest.approx(memory.num_requests / every, abs=0.0051)


def test_requests_with_a_small_pool_of_windows():
    name, slices = LINES[STARTS[-1]][0].removesuffix(", slice"), LINES[STARTS[-1]][1:]
    documented = next(line[1:] for line in LINES if line[0] == WITH_FULL_TOKENS)
    load = [*LOAD, "--swa-full-tokens-ratio", "0.1"]
    found = [planned(name, own, load)[1].num_requests for own in slices]
    assert list(map(int, documented)) == found


def test_memory_of_shared_caches():
    load, (names, _, *lines) = rows("Shared caches")
    figures = {line[0]: line[1:] for line in lines}
    for column, name in enumerate(names[1:]):
        request, memory = planned(name, figures["slice"][column], load)
        documented = [
            figures[row][column].replace(",", "")
            for row in (
                *("weights a device, GiB", "bytes of a token's KV on a device"),
                *("requests at once", "... if every layer kept every token"),
            )
        ]
        weights, every = memory.weight_bytes / GIB, requests_without_windows(request, memory)
        counts = memory.kv_token_bytes, memory.num_requests, every
        assert documented == [f"{weights:.2f}", *map(str, counts)]
        assert figures["... without shared caches"][column] == str(
            requests_without_sharing(request) or ""
        )
