"""Converts prompts to token ids, and image files to pixels, without blocking the event loop.

No work that grows with a client's request runs on the loop, each piece of work has a time limit,
and clients take turns. The workers are processes (`sgl_jax.text.worker`).
"""

import asyncio
import contextlib
import logging
import os
import time
from array import array
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

import msgspec

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.server.errors import ApiError
from sgl_jax.text.jobs import (
    LENGTH,
    READY,
    DecodedImage,
    DecodeImage,
    EncodeChat,
    EncodeTexts,
    Job,
    JobAnswer,
    Probed,
    ProbeTemplate,
    Refused,
    TokenIds,
    frame,
    is_last,
)
from sgl_jax.text.template_abilities import TemplateAbilities
from sgl_jax.text.worker_process import TextWorkers

logger = logging.getLogger(__name__)
# One more than a client gets at a time. Half of the processors, which the engine also needs.
_NUM_WORKERS = max(2, min(8, (os.cpu_count() or 2) // 2))
_WORKER_START_S = 60.0  # the tokenizer may still be loading
_GRACE_S = 5.0  # normally the kernel ends a worker in time; this covers a stopped worker
_PROBE_S = 10.0  # total for probing a chat template
# Of decoded images that wait for others of their requests.
_MAX_PIXEL_BYTES = 2**30
_MAX_TRIES = 5
_RETRY_S = 0.05  # the delay grows by this with each try
Ids: TypeAlias = "array[int]"  # int32: a list takes nine times the memory, and is slow to build
_Done: TypeAlias = TokenIds | DecodedImage | Probed
_Answers: TypeAlias = "list[asyncio.Future[_Done]]"
_Work: TypeAlias = "tuple[Job, asyncio.Future[_Done], _Answers]"  # with all answers of its request
# What a job does, for the error that it took too long.
_WORK: dict[type[Job], str] = {
    EncodeTexts: "the tokenizer",
    EncodeChat: "the chat template and the tokenizer",
    ProbeTemplate: "the chat template and the tokenizer",
    DecodeImage: "decoding an image",
}
_decoder = msgspec.msgpack.Decoder(JobAnswer)


class TextPool:
    """The workers' queue, bound to one event loop, which must call `start` and `close`."""

    def __init__(self, workers: TextWorkers) -> None:
        self._workers = workers
        self._queue: FairQueue[_Work] = FairQueue(max_at_once=_NUM_WORKERS - 1)
        self._serving: list[asyncio.Task[None]] = []
        self.num_open = 0  # requests with prompts or images being converted or waiting
        self._pixel_bytes = 0  # of images decoded for requests in `num_open`
        self.abilities: TemplateAbilities | None = None  # of the chat template; set by `probe`

    def start(self) -> None:
        self._serving = [asyncio.ensure_future(self._serve()) for _ in range(_NUM_WORKERS)]

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def probe(self) -> None:
        """Find the abilities of the chat template for all later conversations, and log them.

        If that takes longer than `_PROBE_S`, the defaults of `TemplateAbilities` are assumed.
        """
        self.abilities = TemplateAbilities()
        try:
            async with asyncio.timeout(_WORKER_START_S + _PROBE_S):
                (answer,) = await self._answers_of("", [ProbeTemplate(_PROBE_S)])
            assert isinstance(answer, Probed)
            self.abilities = answer.abilities
        except (ApiError, TimeoutError) as error:
            logger.warning("the chat template cannot be probed: %s", error or "no worker started")
        logger.info("chat template: %s", msgspec.json.encode(self.abilities).decode())

    async def run(self, client: str, jobs: Sequence[EncodeTexts | EncodeChat]) -> list[Ids]:
        """Return token ids of each text or conversation of `jobs`, queued under the name `client`.

        If one fails, or the caller is cancelled, the remaining jobs are not started.

        Raises:
            InvalidRequestError: a conversation is too long, or refused by the template.
            ApiError: 503, it took too long.
        """
        answers = await self._answers_of(client, jobs)
        encoded = [answer.ids for answer in answers if isinstance(answer, TokenIds)]
        return [array("i", ids) for each in encoded for ids in each]

    async def decode(
        self, client: str, jobs: Iterable[Awaitable[DecodeImage]]
    ) -> list[DecodedImage]:
        """Return each image of a request, as `run` does for texts. Raises as `run` does.

        A job that holds a file is done before the next one is awaited.
        """
        with self._request() as answers:
            for awaited in jobs:
                job = await awaited
                answer = self._put(client, job, answers)
                if job.file:  # no limit of bodies bounds it
                    await answer
            done = [await answer for answer in answers]
        return [image for image in done if isinstance(image, DecodedImage)]

    async def _answers_of(self, client: str, jobs: Sequence[Job]) -> list[_Done]:
        with self._request() as answers:
            for job in jobs:
                self._put(client, job, answers)
            return [await answer for answer in answers]

    @contextlib.contextmanager
    def _request(self) -> Iterator[_Answers]:
        """Yield a list for the answers of a request; on exit, cancel those that are not there, and
        count its pixels no more."""
        answers: _Answers = []
        self.num_open += 1
        try:
            yield answers
        finally:
            self.num_open -= 1
            self._pixel_bytes -= _pixel_bytes_in(answers)
            for answer in answers:
                answer.cancel()

    def _put(self, client: str, job: Job, answers: _Answers) -> "asyncio.Future[_Done]":
        answer: asyncio.Future[_Done] = asyncio.get_running_loop().create_future()
        answers.append(answer)
        self._queue.put(client, (job, answer, answers))
        return answer

    def _hold(self, answer: _Done, answers: _Answers) -> None:
        """Count an answer; `answers` are those of its request.

        Raises:
            InvalidRequestError: the request has more pixels than could ever be held.
            ApiError: 503, there are too many of all requests now.
        """
        num_bytes = _pixel_bytes_of(answer)
        if not num_bytes:
            return
        if _pixel_bytes_in(answers) + num_bytes > _MAX_PIXEL_BYTES:
            raise InvalidRequestError(
                f"the images of a request may have {_MAX_PIXEL_BYTES // 3} pixels after resizing: "
                "send fewer or smaller ones"
            )
        if self._pixel_bytes + num_bytes > _MAX_PIXEL_BYTES:
            raise ApiError(503, "the server holds too many images", code="too_many_bytes")
        self._pixel_bytes += num_bytes

    async def _serve(self) -> None:
        with contextlib.closing(_Worker(self._workers)) as worker:
            while True:
                client, (job, answer, answers) = await self._queue.get()
                try:
                    result = None if answer.done() else await worker.do(job)
                    if result is not None and not answer.done():
                        self._hold(result, answers)
                        answer.set_result(result)
                except Exception as error:
                    if not isinstance(error, (ApiError, InvalidRequestError)):
                        worker.close()  # out of memory, or a defect: the worker's state is unknown
                    if not answer.done():
                        answer.set_exception(error)
                finally:
                    self._queue.done(client)


def _pixel_bytes_of(answer: _Done) -> int:
    return len(answer.pixels) if isinstance(answer, DecodedImage) else 0


def _pixel_bytes_in(answers: _Answers) -> int:
    done = (answer for answer in answers if answer.done() and not answer.cancelled())
    return sum(_pixel_bytes_of(answer.result()) for answer in done if answer.exception() is None)


class _Worker:
    """A connection to a worker, opened when there is work and again after the worker has ended."""

    def __init__(self, workers: TextWorkers) -> None:
        self._workers = workers
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def do(self, job: Job) -> _Done:
        """Return the worker's answer. Raises `InvalidRequestError` (refused) or `ApiError` 503."""
        data = frame(job)
        for num_tries in range(_MAX_TRIES):
            await asyncio.sleep(num_tries * _RETRY_S)
            start = None
            try:
                reader, writer = await self._connected()
                start = time.monotonic()
                async with asyncio.timeout(job.seconds + _GRACE_S):
                    writer.write(data)
                    await writer.drain()
                    (num_bytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                    answer: JobAnswer = _decoder.decode(await reader.readexactly(num_bytes))
            except (OSError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
                self.close()
                if start is not None and time.monotonic() - start >= job.seconds:
                    raise ApiError(
                        503,
                        f"{_WORK[type(job)]} took longer than {job.seconds:.0f} s",
                        code="text_timeout",
                    ) from None
                logger.warning("a text worker ended; starting another one")
                continue
            if is_last(job, len(data)):
                self.close()
            if isinstance(answer, Refused):
                raise InvalidRequestError(answer.message, answer.param, answer.code)
            return answer
        raise ApiError(503, "the prompt could not be encoded; try again", code="text_worker")

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._workers.new_worker())
            async with asyncio.timeout(_WORKER_START_S):
                await self._streams[0].readexactly(len(READY))
        return self._streams

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue in which each client's work is first come, first served, and clients take turns.

    At most `max_at_once` pieces of a client's work are in progress, so that there is always a
    worker for another client.
    """

    def __init__(self, max_at_once: int) -> None:
        self._max_at_once = max_at_once
        self._waiting: dict[str, deque[T]] = {}  # in the order of turns
        self._num_out: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def put(self, client: str, work: T) -> None:
        self._waiting.setdefault(client, deque()).append(work)
        self._changed.set()

    async def get(self) -> tuple[str, T]:
        """Return the next client, and its work. `done` must follow."""
        while True:
            for client, waiting in self._waiting.items():
                if self._num_out[client] < self._max_at_once:
                    del self._waiting[client]
                    work = waiting.popleft()
                    if waiting:
                        self._waiting[client] = waiting  # to the end of the order
                    self._num_out[client] += 1
                    return client, work
            self._changed.clear()
            await self._changed.wait()

    def done(self, client: str) -> None:
        self._num_out[client] -= 1
        if not self._num_out[client]:
            del self._num_out[client]
        self._changed.set()
