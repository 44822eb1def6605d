"""Clients that other people publish, against running servers of the demonstration model.

    pip install -e ".[test,clients]"
    python -m pytest -m long tests/clients

Each file is about one client and is skipped where that client is not installed:

- `test_router.py`: sglang-router before two workers, asked by the `openai` client and by httpx
- `test_too_long.py`: litellm and langchain-openai tell a prompt that is too long from other errors
- `test_agents.py`: instructor, pydantic-ai, langchain-openai and litellm with schemas and tools
- `test_node.py`: npm's `openai` in node; needs node and npm (which asks its registry)
- `test_benches.py`: lm-eval, guidellm and aiperf, looked for on the PATH, and SGLang's
  `bench_serving` from its wheel, which pip downloads
- `test_bench_bodies.py`: the request bodies of SGLang's and sglang-jax's `bench_serving`; needs no
  package, since these benches are no packages of their own
- `test_browser.py`: npm's `openai` in headless Chromium, in a page of another origin; needs node,
  npm (which asks its registry) and chromium

Servers, routers and browsers run on free loopback ports and are ended by their process ids.
"""

from collections.abc import Iterator

import pytest

from tests.live.live_server import LiveServer, live_server

# The demonstration model takes 8,192 tokens; a prompt that is too long is shorter this way.
CONTEXT_LENGTH = 512


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("worker")
    flags = ("--context-length", str(CONTEXT_LENGTH), "--cors-allow-origins", "*")
    with live_server(folder, *flags) as server:
        yield server
        server.assert_nothing_leaked()


@pytest.fixture(scope="session")
def second_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("second_worker")
    with live_server(folder, "--context-length", str(CONTEXT_LENGTH)) as server:
        yield server
        server.assert_nothing_leaked()
