"""Record what transformers computes with the weights of a GGUF file: tests/golden/gguf.

Needs torch, transformers and gguf (torch is never a dependency of the package):

    python scripts/make_gguf_golden.py MODEL.gguf tests/golden/gguf/NAME.npz

transformers has a separate reader, so a wrong config or order of rows here would show. In float32,
for 50 prompts,
    prompts [sum of lens]          the prompts' tokens, one after the other
    prompt_lens [50]
    prompt_logprobs [sum of lens]  of each prompt token after those before it; 0 for the first
    tokens [50, 24]                the tokens that greedy decoding appends, also after an end
    logprobs [50, 24]              of these
"""

import pydoc_data.topics
import re
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.text.tokenizer import Tokenizer

NUM_NEW = 24
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue in two sentences.",
    "Name three uses of copper.",
    "How do I reverse a list in Python?",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "What is the difference between a virus and a bacterium?",
    "Suggest a name for a cat.",
    "List the planets of the solar system.",
    "What does HTTP stand for?",
    "Describe a sunset to someone who cannot see.",
    "How long does light take from the Sun to the Earth?",
    "Write a haiku about winter.",
    "What is photosynthesis?",
    "Tell me a fun fact about octopuses.",
    "Is a tomato a fruit?",
    "How can I sleep better?",
)
# Tokens of the prompts of running text. Some are longer than Gemma's windows of 512.
TEXT_LENS = (*range(8, 104, 4), 520, 600, 680, 760, 840, 920)


def main() -> None:
    file, output = map(Path, sys.argv[1:])
    tokenizer = Tokenizer.load(model_folder(str(file)))
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    print(model.config)
    prompts = [*questions(tokenizer), *texts(tokenizer)]
    found = []
    for number, prompt in enumerate(prompts):
        found.append(greedy(model, prompt))
        print(number, len(prompt), repr(tokenizer.decode(found[-1][1]))[:100], flush=True)
    logprobs_of_prompts, tokens, logprobs = zip(*found, strict=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        output,
        prompts=np.concatenate(prompts).astype(np.int32),
        prompt_lens=np.array([len(prompt) for prompt in prompts], np.int32),
        prompt_logprobs=np.concatenate(logprobs_of_prompts),
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
    )


def questions(tokenizer: Tokenizer) -> list[list[int]]:
    if not tokenizer.chat_template:
        return [tokenizer.encode(f"Question: {question}\nAnswer:") for question in QUESTIONS]
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(message) for message in messages]


def texts(tokenizer: Tokenizer) -> list[list[int]]:
    """Pieces of Python's documentation, each from another page."""
    pages = [text for text in pydoc_data.topics.topics.values() if len(text) > 12_000]
    pages = [re.sub(r"[ \t]+", " ", page) for page in pages]
    return [
        tokenizer.encode(pages[i % len(pages)][100 * i :])[:size]
        for i, size in enumerate(TEXT_LENS)
    ]


@torch.inference_mode()
def greedy(model, prompt: list[int]) -> tuple[np.ndarray, list[int], list[float]]:
    """Return the log-probabilities of the prompt's tokens, the greedy tokens and theirs."""
    assert getattr(model.config, "final_logit_softcapping", None) is None

    def scores(hidden: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(model.lm_head(hidden).double(), -1)

    out = model.model(torch.tensor([prompt]), use_cache=True)
    hidden, of_prompt = out.last_hidden_state[0], [0.0]
    # A part at a time: all scores of a long prompt take gigabytes.
    for start in range(0, len(prompt) - 1, 64):
        wanted = torch.tensor(prompt[start + 1 : start + 65])
        found = scores(hidden[start : start + len(wanted)])
        of_prompt += found.gather(1, wanted[:, None])[:, 0].tolist()
    tokens, logprobs = [], []
    for _ in range(NUM_NEW):
        last = scores(hidden[-1])
        tokens.append(int(last.argmax()))
        logprobs.append(float(last[tokens[-1]]))
        out = model.model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values)
        hidden = out.last_hidden_state[0]
    return np.array(of_prompt, np.float32), tokens, logprobs


if __name__ == "__main__":
    main()
