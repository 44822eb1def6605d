"""Tokenizes and writes chat prompts outside the server process, within a time limit.

`python -m sgl_jax.text.worker FD TOKENIZER_PATH [CHAT_TEMPLATE]` loads the tokenizer once, then
forks a worker for each socket received over the socket FD. A worker does one job at a time
(`jobs.py`). If a job exceeds its time limit, the kernel ends the worker, because nothing else can
stop a template, which is a program, or the tokenizer's native code. After a long text a worker
ends, which frees its memory. Both are cheap, because a fork is.

Must never start a thread before it forks.
"""

import gc
import os
import resource
import signal
import socket
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sgl_jax.core.errors import ContextLengthError, InvalidRequestError
from sgl_jax.text.jobs import (
    LAST_JOB_BYTES,
    LENGTH,
    READY,
    EncodeChat,
    Job,
    JobAnswer,
    Probed,
    ProbeTemplate,
    Refused,
    TokenIds,
    frame,
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
    """Do jobs until there are no more, or one was long."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = in_use + _MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    decoder = msgspec.msgpack.Decoder(Job)
    stream = jobs.makefile("rb")
    jobs.sendall(READY)
    num_bytes = 0
    while num_bytes < LAST_JOB_BYTES:
        data = _read_frame(stream)
        if data is None:
            return
        num_bytes = len(data)
        job = decoder.decode(data)
        signal.setitimer(signal.ITIMER_REAL, job.seconds)
        answer = frame(_answer(job, tokenizer))
        signal.setitimer(signal.ITIMER_REAL, 0)
        jobs.sendall(answer)


def _answer(job: Job, tokenizer: Tokenizer) -> JobAnswer:
    try:
        if isinstance(job, ProbeTemplate):
            return Probed(tokenizer.abilities)
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
    prompt = tokenizer.render_chat(
        msgspec.json.decode(job.messages, type=list[dict[str, Any]]),
        tools=msgspec.json.decode(job.tools),
        continue_final_message=job.continue_final_message,
        template_args=msgspec.json.decode(job.template_args, type=dict),
        abilities=job.abilities,
    )
    if len(prompt) > job.max_chars:
        raise ContextLengthError(
            f"the {len(prompt)} characters that the chat template wrote (at most {job.max_chars} "
            "are taken)",
            job.max_tokens,
            "messages",
        )
    return tokenizer.encode(prompt, add_special_tokens=False)


def _read_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
