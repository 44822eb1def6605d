"""outlines: OpenAI's schemas; by its model for SGLang also choices, patterns and grammars."""

import datetime
import json
from typing import Any, Literal

import openai
import pytest

from tests.clients.demo_tool import SUM, SUM_QUESTION, Sum
from tests.live.live_server import LiveServer

outlines = pytest.importorskip("outlines")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:SGLang grammar")]

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 200}
ARITHMETIC = """
?start: sum
?sum: INT ("+" INT)*
%import common.INT
"""


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("maker", ["from_openai", "from_sglang"])
def test_texts_and_objects(client: openai.OpenAI, maker: str) -> None:
    model = getattr(outlines, maker)(client, "demo")
    assert model(SUM_QUESTION, **SETTINGS) == SUM
    assert "".join(model.stream(SUM_QUESTION, **SETTINGS)) == SUM
    Sum.model_validate_json(model(SUM_QUESTION, Sum, **SETTINGS))
    Sum.model_validate_json("".join(model.stream(SUM_QUESTION, Sum, **SETTINGS)))


def test_types_and_grammars(client: openai.OpenAI) -> None:
    model = outlines.from_sglang(client, "demo")

    def get(kind: Any) -> str:
        answer: str = model(SUM_QUESTION, kind, **SETTINGS)
        return answer

    assert get(Literal["yes", "no"]) in ("yes", "no")
    assert int(get(int))
    assert datetime.date.fromisoformat(get(datetime.date))
    assert len(get(outlines.regex("[0-9]{3}-[a-z]{2}"))) == 6
    assert sum(map(int, get(outlines.cfg(ARITHMETIC)).split("+"))) == 42
    json.loads(get(outlines.json_schema('{"properties": {"a": {"type": "integer"}}}')))
