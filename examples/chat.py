"""Hold a conversation with OpenAI's client; each request has the whole conversation.

It needs a server (`scripts/serve`). Its URL is an optional argument. It prints:

    The code of Anna is 471.    Noted.
    What is 17 + 25?            17 + 25 = 42.
    What is the code of Anna?   It is 471.
    What is the code of Ben?    I don't know.
    Sort 5 2 9 1.               1 2 5 9.
"""

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

QUESTIONS = (
    "The code of Anna is 471.",
    "What is 17 + 25?",
    "What is the code of Anna?",
    "What is the code of Ben?",
    "Sort 5 2 9 1.",
)


def main(url: str = "http://127.0.0.1:30000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[ChatCompletionMessageParam] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        completion = client.chat.completions.create(model="demo", messages=messages, temperature=0)
        answer = completion.choices[0].message.content or ""
        print(f"{question:27} {answer}")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:])
