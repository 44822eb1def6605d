"""Print an answer while it is generated, then the number of its tokens.

It needs a server (`scripts/serve`). Its URL is an optional argument. It prints:

    17 + 25 = 42.
    18 prompt and 12 output tokens
"""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:30000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is 17 + 25?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            print(event.choices[0].delta.content, end="", flush=True)
        if event.usage:  # the last event
            usage = event.usage
            print(f"\n{usage.prompt_tokens} prompt and {usage.completion_tokens} output tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
