"""Let the model call a function, and send it the result.

It needs a server (`scripts/serve`). Its URL is an optional argument. It prints:

    get_weather {"city": "Paris"}
    It is rainy and 12 degrees in Paris.
"""

import json
import sys
from typing import Any

from openai import OpenAI

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]


def get_weather(city: str) -> dict[str, Any]:
    """Look up the weather of a city; this one has the same everywhere."""
    return {"weather": "rainy", "degrees": 12}


def main(url: str = "http://127.0.0.1:30000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]

    def answer() -> Any:
        completion = client.chat.completions.create(
            model="demo", messages=messages, tools=TOOLS, temperature=0
        )
        messages.append(completion.choices[0].message)
        return completion.choices[0].message

    for call in answer().tool_calls:
        print(call.function.name, call.function.arguments)
        result = json.dumps(get_weather(**json.loads(call.function.arguments)))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(answer().content)


if __name__ == "__main__":
    main(*sys.argv[1:])
