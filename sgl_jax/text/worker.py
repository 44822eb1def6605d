"""Tokenizes and writes chat prompts, and decodes images, outside the server process.

`python -m sgl_jax.text.worker FD TOKENIZER_PATH [CHAT_TEMPLATE]` loads the tokenizer once, then
forks a worker for each socket received over the socket FD. A worker does one job at a time
(`jobs.py`). If a job exceeds its time limit, the kernel ends the worker, because nothing else can
stop a template, which is a program, or native code of the tokenizer and of image decoders. After a
long text or an image a worker ends, which frees its memory. Both are cheap, because a fork is.

Must never start a thread before it forks.
"""

import gc
import os
import resource
import secrets
import signal
import socket
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from sgl_jax.core.errors import ContextLengthError, InvalidRequestError
from sgl_jax.text.images import decode_image
from sgl_jax.text.jobs import (
    LENGTH,
    READY,
    DecodeImage,
    EncodeChat,
    Job,
    JobAnswer,
    Probed,
    ProbeTemplate,
    Refused,
    TokenIds,
    frame,
    is_last,
)
from sgl_jax.text.tokenizer import Tokenizer

# Above its memory at the start. Tokenization takes about 100 bytes for each byte of text.
_MOST_MEMORY_BYTES = 4 * 2**30


def main(arguments: Sequence[str]) -> int:
    """Fork workers until the parent closes its end, and return the exit code."""
    # A service manager signals every process of the service; only the parent ends this one.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Exit codes of workers are not read: leave no zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=int(arguments[0]))
    try:
        tokenizer = Tokenizer.load(*arguments[1:])
    except ValueError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    # A collection would copy the pages shared with the workers, and free nothing.
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return 0
        for descriptor in descriptors:
            if os.fork() == 0:
                control.close()
                with socket.socket(fileno=descriptor) as jobs:
                    _work(jobs, tokenizer)
                os._exit(0)
            os.close(descriptor)


def _work(jobs: socket.socket, tokenizer: Tokenizer) -> None:
    """Do jobs until there are no more, or one is the last."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = in_use + _MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    decoder = msgspec.msgpack.Decoder(Job)
    stream = jobs.makefile("rb")
    jobs.sendall(READY)
    is_done = False
    while not is_done:
        data = _read_frame(stream)
        if data is None:
            return
        job = decoder.decode(data)
        is_done = is_last(job, len(data))
        signal.setitimer(signal.ITIMER_REAL, job.seconds)
        answer = frame(_answer(job, tokenizer))
        signal.setitimer(signal.ITIMER_REAL, 0)
        jobs.sendall(answer)


def _answer(job: Job, tokenizer: Tokenizer) -> JobAnswer:
    try:
        if isinstance(job, ProbeTemplate):
            return Probed(tokenizer.abilities)
        if isinstance(job, DecodeImage):
            return decode_image(job)
        encoded: Iterable[list[int]]
        if isinstance(job, EncodeChat):
            encoded = [_encode_chat(job, tokenizer)]
        else:
            special = job.add_special_tokens
            encoded = (tokenizer.encode(text, add_special_tokens=special) for text in job.texts)
        return TokenIds([array("i", ids).tobytes() for ids in encoded])
    except InvalidRequestError as error:
        return Refused(str(error), error.param, error.code)


def _encode_chat(job: EncodeChat, tokenizer: Tokenizer) -> list[int]:
    guard, parts = secrets.token_hex(8), [job.messages, job.tools, job.template_args]
    if job.images is not None:
        for token in {job.images.placeholder_id, job.images.image_token_id}:
            parts = [_guarded(part, tokenizer.text_of(token), guard) for part in parts]
    messages, tools, template_args = map(msgspec.json.decode, parts)
    prompt = tokenizer.render_chat(
        messages,
        tools=tools,
        continue_final_message=job.continue_final_message,
        template_args=template_args,
        abilities=job.abilities,
    )
    if len(prompt) > job.max_chars:
        raise ContextLengthError(
            f"the {len(prompt)} characters that the chat template wrote (at most {job.max_chars} "
            "are taken)",
            job.max_tokens,
            "messages",
        )
    if job.images is None:
        return tokenizer.encode(prompt, add_special_tokens=False)
    prompt = job.images.expanded(prompt, tokenizer.text_of)
    pieces = (tokenizer.encode(p, add_special_tokens=False) for p in prompt.split(guard) if p)
    ids = [token for piece in pieces for token in piece]
    num_placeholders = ids.count(job.images.image_token_id)
    if num_placeholders != job.num_images:
        raise InvalidRequestError(
            f"messages: {job.num_images} images were sent, but the model's chat template wrote "
            f"{num_placeholders}",
            "messages",
        )
    return ids


def _guarded(part: bytes, placeholder: str, guard: str) -> bytes:
    """Return the JSON `part` with `guard` inserted into each text like the placeholder of an image.

    The prompt is split there before it is tokenized, so that the text stays text.
    """
    if not placeholder:  # the tokenizer has no such token
        return part
    inserted = placeholder[:1] + guard + placeholder[1:]
    return part.replace(placeholder.encode(), inserted.encode())


def _read_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
