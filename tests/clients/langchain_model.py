"""The demonstration model as a model of langchain."""

from typing import Any

import pytest

from tests.live.live_server import LiveServer


def chat_model(server: LiveServer, **settings: Any) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    return langchain.ChatOpenAI(
        model="demo",
        base_url=server.url + "/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
        max_tokens=200,
        **settings,
    )
