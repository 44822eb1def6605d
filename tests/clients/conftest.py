"""Clients that other people publish, against running servers of the demonstration model.

    pip install -e ".[test,clients]"
    python -m pytest -m long tests/clients

Each file is about one client and is skipped where that client is not installed:

- `test_router.py`: sglang-router before two workers, asked by the `openai` client and by httpx
- `test_router_discovery.py`: sglang-router, which finds its worker in Kubernetes' API
- `test_too_long.py`: litellm and langchain-openai tell a prompt that is too long from other errors
- `test_agents.py`: instructor, pydantic-ai, langchain-openai and litellm with schemas and tools
- `test_litellm_proxy.py`: litellm's proxy as a process, asked by OpenAI's and Anthropic's clients
- `test_llm.py`, `test_langgraph.py`, `test_dspy.py`, `test_smolagents.py`, `test_outlines.py`: one
  client each
- `test_aider.py`: looked for on the PATH, because its pins differ from those of the extra
- `test_node.py`: npm's `openai` in node; needs node and npm (which asks its registry)
- `test_npm.py`: Vercel's `ai` and `@langchain/openai`; needs `npm install --prefix
  tests/clients/node`
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("server"), "--check-memory", "busy") as server:
        yield server
        server.assert_nothing_leaked()


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
