"""Keep a conversation in the server's memory, and take back its last turn.

Each turn sends only its text, and the server computes only that. It needs a server
(`scripts/serve`). Its URL is an optional argument. With an empty prefix cache it prints:

    Noted.           20 prompt tokens, 0 in place
    17 + 25 = 42.    42 prompt tokens, 23 in place
    It is 471.       72 prompt tokens, 54 in place
    back to turn 2
    I don't know.    71 prompt tokens, 48 in place
"""

import sys
from typing import Any

import httpx


def main(url: str = "http://127.0.0.1:30000") -> None:
    with httpx.Client(base_url=url, timeout=60) as client:

        def post(route: str, **body: Any) -> Any:
            return client.post(route, json=body).raise_for_status().json()

        def say(text: str, before: str = "\n") -> None:  # the template's line break between turns
            answer = post(
                "/generate",
                text=f"{before}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
                sampling_params={"temperature": 0},
                session_params={"id": session},
            )
            used = answer["meta_info"]
            counts = f"{used['prompt_tokens']} prompt tokens, {used['cached_tokens']} in place"
            print(f"{answer['text']:16} {counts}")

        session = post("/open_session", capacity_of_str_len=0, streaming=True)
        say("The code of Anna is 471.", before="")
        say("What is 17 + 25?")
        say("What is the code of Anna?")
        post("/rollback_session", session_id=session, num_turns=2)
        print("back to turn 2")
        say("What is the code of Ben?")
        post("/close_session", session_id=session)


if __name__ == "__main__":
    main(*sys.argv[1:])
