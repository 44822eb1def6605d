"""Get an answer as an object of a class: the output is JSON by the class's schema.

It needs a server (`scripts/serve`). Its URL is an optional argument. The demonstration model was
not trained on JSON, so the number is wrong, but it is within the limits:

    result=1
"""

import sys

from openai import OpenAI
from pydantic import BaseModel, Field


class Sum(BaseModel):
    result: int = Field(ge=0, le=99)


def main(url: str = "http://127.0.0.1:30000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    completion = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": "What is 12 plus 30?"}],
        response_format=Sum,
        temperature=0,
    )
    print(completion.choices[0].message.parsed)


if __name__ == "__main__":
    main(*sys.argv[1:])
