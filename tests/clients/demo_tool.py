"""What the demonstration model answers, and its one tool, in the forms that clients take."""

from typing import Any, Literal

import pydantic

SUM_QUESTION, SUM = "What is 17 + 25?", "17 + 25 = 42."
SUM_PROMPT = f"<|im_start|>user\n{SUM_QUESTION}<|im_end|>\n<|im_start|>assistant\n"
QUESTION = "What is the weather in Paris?"
REPORT = "It is rainy and 12 degrees in Paris."
RESULT = '{"weather": "rainy", "degrees": 12}'
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """The weather in a city now."""
    assert city == "Paris"
    return RESULT


class Sum(pydantic.BaseModel):
    """Of two numbers. A schema that leaves a small model little to get wrong."""

    left: int = pydantic.Field(ge=0, le=99)
    kind: Literal["sum", "difference"]
    is_sure: bool
