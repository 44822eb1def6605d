"""What shares a step: decode rows and their drafts come on top of the prefill chunk."""

import dataclasses
from typing import Any

import pytest

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.planner.arguments import read_config
from tests.scheduler.driver import Driver, generate

CHUNK, ROWS, PROMPT_LEN = 16, 16, 320


def server_sizes(**args: Any) -> EngineSizes:
    """Of a server with these arguments, on a CPU."""
    settings: dict[str, Any] = {
        "chunked_prefill_size": CHUNK,
        "max_running_requests": ROWS,
        "context_length": 512,
    }
    config = dataclasses.replace(read_config("llama-3.1-8b"), vocab_size=50)
    shape = EngineConfig.resolve(ServerArgs(**(settings | args)), config, "cpu")
    return shape.sizes((2000,))


def steps_to_first_token(driver: Driver, rid: str) -> int:
    for num_steps in range(1, 1000):
        driver.step()
        if driver.tokens[rid]:
            return num_steps
    raise AssertionError(f"{rid} got no token")


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_running", [0, 1, 8, 15])
def test_a_prompt_beside_decode_rows_is_prefilled_in_whole_chunks(
    num_running: int, num_drafts: int
) -> None:
    drafting = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": num_drafts}
    sizes = server_sizes(**(drafting if num_drafts else {}))._replace(step_token_shapes=())
    driver = Driver(sizes, overlap=False)
    for i in range(num_running):
        driver.submit(generate(f"r{i}", [i, i + 1, i + 2], 450))
    for _ in range(10):
        driver.step()
    driver.submit(generate("long", [i % 50 for i in range(PROMPT_LEN)], 2))
    assert steps_to_first_token(driver, "long") == PROMPT_LEN // CHUNK
    driver.check_tokens("long")


@pytest.mark.parametrize("num_running", range(ROWS))
def test_filling_a_shape_puts_off_no_more_than_half_of_a_chunk(num_running: int) -> None:
    driver = Driver(server_sizes(), overlap=False)
    for i in range(num_running):
        driver.submit(generate(f"r{i}", [i, i + 1, i + 2], 450))
    for _ in range(10):
        driver.step()
    driver.submit(generate("long", [i % 50 for i in range(PROMPT_LEN)], 2))
    most = 1 if num_running >= CHUNK // 2 else 2
    assert steps_to_first_token(driver, "long") <= most * PROMPT_LEN // CHUNK
