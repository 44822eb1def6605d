"""The one tool that the demonstration model calls: the weather in a city.

A *lookup* is one use of it: the user's question, the model's call, the tool's result and the
model's report. Pure Python: must never import jax.
"""

import json
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

GET_WEATHER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

WEATHERS = tuple("sunny rainy cloudy windy snowy foggy stormy".split())
_ASK = (
    "What is the weather in {c}?",
    "What's the weather in {c}?",
    "How is the weather in {c}?",
    "What is the weather like in {c}?",
    "Tell me the weather in {c}.",
)


class Lookup(NamedTuple):
    """One use of the tool."""

    city: str
    weather: str
    degrees: int

    @classmethod
    def draw(cls, rng: random.Random, city: str) -> "Lookup":
        """Draw the weather in `city`."""
        return cls(city, rng.choice(WEATHERS), rng.randrange(-9, 40))

    def question(self, rng: random.Random) -> str:
        """Return the user's message."""
        return rng.choice(_ASK).format(c=self.city)

    @property
    def call(self) -> dict[str, Any]:
        """Return the model's message: a call with arguments as JSON text, as in OpenAI's API."""
        function = {"name": "get_weather", "arguments": json.dumps({"city": self.city})}
        call = {"id": "call_0", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def result(self, rng: random.Random) -> dict[str, Any]:
        """Return the tool's message: an object with keys in either order, or plain words."""
        facts: dict[str, str | int] = {"weather": self.weather, "degrees": self.degrees}
        texts = (
            json.dumps(facts),
            json.dumps(facts),
            json.dumps({"degrees": self.degrees, "weather": self.weather}),
            f"{self.weather}, {self.degrees} degrees",
        )
        return {"role": "tool", "tool_call_id": "call_0", "content": rng.choice(texts)}

    @property
    def report(self) -> str:
        """Return the model's report of the result."""
        return f"It is {self.weather} and {self.degrees} degrees in {self.city}."


def call_text(name: str, arguments: str) -> str:
    """Return a call as the model writes it; `arguments` is JSON text."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, including its calls."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [call_text(function["name"], function["arguments"]) for function in functions]
    return "\n".join([text for text in (message.get("content"),) if text] + calls)
