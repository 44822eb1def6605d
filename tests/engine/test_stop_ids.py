"""A model with more end tokens than a request may name stops at each of them."""

import json
import shutil
from pathlib import Path

from sgl_jax.engine.offline import Engine

DEMO = Path(__file__).parents[2] / "models" / "demo"
NUM_END_TOKENS = 20
FIRST = 40


def test_the_last_of_many_end_tokens_ends_outputs_and_is_masked_before_the_minimum(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model")
    ids = list(range(FIRST, FIRST + NUM_END_TOKENS))
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.exists():
            file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ids}))
    asked = list(range(100, 116))
    sampling = [
        {"logit_bias": {ids[-1]: 100.0}},
        {"logit_bias": {ids[-1]: 100.0}, "min_new_tokens": 3},
        {"logit_bias": {asked[-1]: 100.0}, "stop_token_ids": asked, "min_new_tokens": 3},
        {"logit_bias": {asked[-1]: 100.0}, "stop_token_ids": asked, "ignore_eos": True},
    ]
    settings = {"warmup": "none", "max_total_tokens": 512, "max_running_requests": 4}
    with Engine(str(folder), chunked_prefill_size=32, page_size=4, **settings) as engine:
        results = engine.generate(
            ["hello"] * len(sampling),
            [{"temperature": 0.0, "max_new_tokens": 9, **each} for each in sampling],
        )
    outputs = [result.output_ids for result in results]
    assert outputs[0] == [ids[-1]]
    assert [len(output) for output in outputs[1:]] == [4, 4, 1]
    assert not {*outputs[1][:3], *outputs[2][:3]} & {*ids, *asked}
    assert [output[-1] for output in outputs] == [ids[-1], ids[-1], asked[-1], asked[-1]]
