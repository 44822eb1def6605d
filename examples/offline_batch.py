"""Generate for many prompts without a server.

It needs a model's folder, by default `models/demo`, and prints:

    What is 3 + 4?        3 + 4 = 7.      stop
    Reverse 4 7 2.        2 7 4.          stop
    Sort 5 2 9 1.         1 2 5 9.        stop
    Where does Tom live?  I don't know.   stop
"""

import sys

from sgl_jax import Engine

QUESTIONS = ("What is 3 + 4?", "Reverse 4 7 2.", "Sort 5 2 9 1.", "Where does Tom live?")


def main(model_path: str = "models/demo") -> None:
    prompts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    # Each program is compiled when it is first used: a short batch needs few of them.
    with Engine(model_path, warmup="none") as engine:
        results = engine.generate(prompts, {"temperature": 0})
    for question, result in zip(QUESTIONS, results, strict=True):
        assert result.finish_reason is not None
        print(f"{question:21} {result.text:15} {result.finish_reason.type}")


if __name__ == "__main__":
    main(*sys.argv[1:])
