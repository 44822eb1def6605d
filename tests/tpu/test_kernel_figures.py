"""The kernels' schedules stay as good as `docs/kernels.md` says: deterministic counts, no times.

The limits are the best that is known of other engines' kernels for the same shape, compiled alike.
"""

import json
import subprocess
import sys

import pytest

from sgl_jax.aot.topology import has_tpu_compiler

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not has_tpu_compiler(),
        reason="libtpu is not installed: pip install 'sgl-jax[tpu]' brings the TPU's compiler",
    ),
]

VMEM_MIB = {"v5e": 128, "v6e": 128}
MAX_BUNDLES = {  # for each KV token, or for each GFLOP
    ("decode, page 128", "v5e"): 1.7,
    ("decode, page 128", "v6e"): 1.5,
    ("decode, page 16", "v5e"): 2.0,
    ("decode, page 16", "v6e"): 2.0,
    ("prefill, page 128", "v5e"): 9_600,
    ("prefill, page 128", "v6e"): 6_900,
}
KERNELS = ("decode-128", "decode-16", "prefill-128")  # as the script calls those above
MAX_SPILLS = {"decode": 0, "prefill": 12_900}


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """What the script reports, by kernel and chip."""
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    # In a process of its own: dumps are asked for before libtpu is loaded.
    script = [sys.executable, "scripts/kernel_cost.py", "--json", str(path), "--only", *KERNELS]
    subprocess.run(script, check=True, timeout=580)
    found = json.loads(path.read_text())
    return {(cost["kernel"], cost["chip"]): cost for cost in found}


@pytest.mark.parametrize(("kernel", "chip"), MAX_BUNDLES)
def test_a_hot_loop_is_short_and_spills_little(kernel, chip, costs):
    cost = costs[kernel, chip]
    assert 0 < cost["bundles"] <= MAX_BUNDLES[kernel, chip]
    assert cost["spills"] <= MAX_SPILLS[kernel.split(",")[0]]
    assert cost["vmem_mib"] <= VMEM_MIB[chip] / 2


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_decode_waits_for_memory_and_not_for_instructions(chip, costs):
    # Cycles that the chip's memory needs for a token of KV of 8 heads of 128 in bfloat16.
    memory_cycles = {"v5e": 7.50, "v6e": 4.37}[chip]
    assert costs["decode, page 128", chip]["bundles"] <= memory_cycles / 2
