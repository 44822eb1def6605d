"""The TPU's attention kernels, simulated on the CPU, serve the same greedy tokens as XLA does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sgl_jax.engine.offline import Engine
from sgl_jax.executor.programs import Programs

ROOT = Path(__file__).parents[2]
# More than a page, and more than a chunk; and a single token, which decodes beside that.
PROMPTS = [
    "<|im_start|>user\nThe code of Anna is 471.<|im_end|>\n"
    "<|im_start|>user\nWhat is the code of Anna?<|im_end|>\n<|im_start|>assistant\n",
    "A",
]
SETTINGS = {
    "device": "cpu",
    "page_size": 16,
    "max_total_tokens": 512,
    "max_running_requests": 2,
    "chunked_prefill_size": 32,
    "context_length": 128,
    "check_memory": "busy",
    "memory_error_action": "crash",
    "warmup": "none",  # few of the shapes are met
    "compilation_cache_dir": "none",
}


def greedy(backend, **settings):
    """Texts, and the tokens they are made of."""
    model = str(ROOT / "models" / "demo")
    with Engine(model, attention_backend=backend, **(SETTINGS | settings)) as engine:
        wanted = {"temperature": 0, "max_new_tokens": 4}
        answers = engine.generate(PROMPTS, wanted)
    return [[answer.text, list(answer.output_ids)] for answer in answers]


def greedy_on_two_devices(**settings):
    """Of the simulation, in a process of its own.

    Simulated devices wait for each other in threads of XLA's, of which it makes as many as the
    machine has cores: where these are few, none is left to copy what is waited for.
    """
    script = (
        "import json, sys\n"
        f"from {__name__} import greedy\n"
        f"print(json.dumps(greedy('pallas', **{settings})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"NPROC": "16", "JAX_NUM_CPU_DEVICES": "2"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout)


@pytest.mark.long
def test_simulated_kernels_serve_the_tokens_that_xla_does():
    expected = greedy("xla")
    assert expected[0][0].startswith("It is")
    assert greedy("pallas") == expected


@pytest.fixture
def heads_of_whole_rows(tmp_path):
    """The config of a small Qwen3 whose heads fill a row of a TPU's lanes; weights are random."""
    config = json.loads((ROOT / "models" / "demo" / "config.json").read_text())
    sizes = {"head_dim": 128, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    kinds = {"layer_types": config["layer_types"][:1]}
    config = config | sizes | kinds | {"initializer_range": 0.2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.long
def test_heads_that_a_kernel_normalises_and_rotates_serve_the_same_tokens(heads_of_whole_rows):
    def generate(backend):
        settings = SETTINGS | {"load_format": "dummy", "attention_backend": backend}
        with Engine(heads_of_whole_rows, **settings) as engine:
            wanted = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
            answers = engine.generate(input_ids=[[*range(5, 25)], [7]], sampling_params=wanted)
        return [list(answer.output_ids) for answer in answers]

    expected = generate("xla")
    assert len({token for tokens in expected for token in tokens}) > 2
    assert generate("pallas") == expected


@pytest.mark.long
def test_a_deterministic_answer_depends_on_neither_batch_nor_chunks(
    heads_of_whole_rows, monkeypatch
):
    compile_step, tokens = Programs.compile_step, []

    def compile_noted(programs, bucket):
        tokens.append(bucket.tokens)
        return compile_step(programs, bucket)

    monkeypatch.setattr(Programs, "compile_step", compile_noted)
    random = np.random.default_rng(0)
    first, *others = (random.integers(3, 200, n).tolist() for n in (40, 230, 17, 5))

    def answers(batch, **settings):
        own = SETTINGS | {"load_format": "dummy", "attention_backend": "pallas"}
        own |= {"enable_deterministic_inference": True, "max_running_requests": 4}
        own |= {"context_length": 256} | settings
        wanted = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        with Engine(heads_of_whole_rows, **own) as engine:
            outputs = engine.generate(input_ids=batch, sampling_params=wanted, return_logprob=True)
        return [(out.output_ids, [own.logprob for own in out.logprobs]) for out in outputs]

    (alone,) = answers([first], chunked_prefill_size=16)
    # Its first step has more than a block's 256 rows, and no step of the other engine has.
    assert answers([*others, first], chunked_prefill_size=320)[-1] == alone
    assert tokens == [256, 320, 256]


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"dp_size": 2}, {"tp_size": 2}], ids=str)
def test_so_do_those_of_two_devices(settings):
    assert greedy_on_two_devices(**settings) == greedy("xla", **settings)
