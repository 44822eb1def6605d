"""The engine loop in a thread of this process, its frontend, and calls that wait for replies."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from sgl_jax.core.engine_messages import EngineMessage, Heartbeat, Reply
from sgl_jax.core.errors import InvalidRequestError, QueueFullError
from sgl_jax.core.messages import CallMessage, GenerateRequest, Shutdown
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.channels import InProcessChannel
from sgl_jax.engine.front.frontend import Frontend
from sgl_jax.engine.front.health import EngineHealth
from sgl_jax.engine.front.request_stream import RequestStream
from sgl_jax.engine.loop.core import EngineCore
from sgl_jax.engine.offline_images import settings_of, with_images
from sgl_jax.engine.offline_inputs import Prompt, Sampling, as_options, as_struct
from sgl_jax.engine.offline_results import Generation, GenerationError, extended
from sgl_jax.engine.opening import open_model_files, open_tracer
from sgl_jax.executor.model_executor import ModelExecutor

logger = logging.getLogger(__name__)


class EngineThread:
    """Runs from its construction until `shutdown`.

    Args:
        args: the engine's settings.
        executor: the executor to run on, which stays open afterwards; None: a new one.
    """

    def __init__(self, args: ServerArgs, executor: ModelExecutor | None = None) -> None:
        self._tracer = open_tracer(args)
        tokenizer = open_model_files(args)
        self.core = EngineCore(args, executor=executor)
        self._channel = InProcessChannel(self._handle)
        self.health = EngineHealth(args.engine_heartbeat_timeout)
        send = self._channel.inbox.put
        self.frontend = Frontend(args, tokenizer, self.core.info, send, self._tracer)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """End the engine and free its memory. Requests in flight end with an abort."""
        if not self.frontend.has_ended:
            self._channel.inbox.put(Shutdown())
        self._thread.join()
        if self._tracer is not None:
            self._tracer.close()

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, Heartbeat):
            self.health.note(message)
        else:
            self.frontend.handle(message)

    def _run(self) -> None:
        reason = "the engine was shut down"
        try:
            self.core.run(self._channel, on_stall=lambda: self.frontend.fail("a step never ended"))
        except Exception as error:  # reported to all requests that wait
            logger.exception("the engine ended")
            reason = f"the engine ended: {error}"
        self.frontend.fail(reason)

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Sampling],
        options: Sequence[Mapping[str, Any]],
        on_ready: Callable[[int], None],
        *,
        streaming: bool,
    ) -> list[RequestStream]:
        """Check all prompts, then submit all. `on_ready` gets the index of a prompt."""
        checks, requests = self.frontend.checks, list[GenerateRequest]()
        for prompt, sampling, own in zip(prompts, params, options, strict=True):
            own = dict(own)
            images = own.pop("image_data", ())
            if images and isinstance(prompt, str):
                prompt = checks.expand_images(prompt, settings_of(self.core.info))
            ids = checks.encode(prompt) if isinstance(prompt, str) else list(prompt)
            if images:
                ids, own["images"] = with_images(ids, images, self.core.info)
            one = as_struct(sampling or {}, SamplingParams, "sampling_params")
            own = {"usual_logprobs_mode": "scaled", **own}
            requests.append(checks.prepare(ids, one, default_max_new_tokens=128, **own))
        streams: list[RequestStream] = []
        try:
            for i, request in enumerate(requests):
                ready, rest = partial(on_ready, i), len(requests) - i
                stream = self.frontend.submit(
                    request, ready, streaming=streaming, num_together=rest
                )
                streams.append(stream)
        except QueueFullError as error:
            self.abandon(streams)
            raise GenerationError(str(error)) from error
        return streams

    def completed(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Sampling],
        options: Sequence[Mapping[str, Any]],
    ) -> Iterator[tuple[int, Generation]]:
        """Submit all prompts, and yield each result as it ends, with the index of its prompt."""
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        streams = self.submit(prompts, params, options, ended.put, streaming=False)
        num_open = len(streams)
        try:
            while num_open:
                index = ended.get()
                chunk = streams[index].take()
                if chunk is not None and chunk.finish is not None:
                    num_open -= 1
                    yield index, extended(None, chunk, streams[index])
        finally:
            self.abandon(streams)

    def outputs(
        self, prompt: Prompt, sampling: Sampling, options: Mapping[str, Any]
    ) -> Iterator[Generation]:
        """Submit one prompt, and yield the whole output so far each time it has grown."""
        ready: queue.SimpleQueue[int] = queue.SimpleQueue()
        each = as_options(options, 1)
        (stream,) = self.submit([prompt], [sampling], each, ready.put, streaming=True)
        so_far = None
        try:
            while so_far is None or so_far.finish_reason is None:
                ready.get()
                chunk = stream.take()
                if chunk is not None:
                    so_far = extended(so_far, chunk, stream)
                    yield so_far
        finally:
            self.abandon([stream])

    async def async_outputs(
        self,
        prompt: Prompt,
        sampling: Sampling,
        options: Mapping[str, Any],
        *,
        streaming: bool,
    ) -> AsyncIterator[Generation]:
        """Run `outputs` without blocking the event loop. Yield only the end if not `streaming`."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def on_ready(_: int) -> None:
            loop.call_soon_threadsafe(ready.set)

        each = as_options(options, 1)
        (stream,) = self.submit([prompt], [sampling], each, on_ready, streaming=streaming)
        so_far = None
        try:
            while so_far is None or so_far.finish_reason is None:
                await ready.wait()
                ready.clear()
                chunk = stream.take()
                if chunk is not None:
                    so_far = extended(so_far, chunk, stream)
                    yield so_far
        finally:
            self.abandon([stream])

    def abandon(self, streams: Sequence[RequestStream]) -> None:
        """End these requests; those that have ended stay as they are."""
        for stream in streams:
            self.frontend.abandon(stream)

    def call(self, message: CallMessage) -> Reply:
        """Return the engine's reply, also if it is a refusal."""
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.frontend.call(message, replies.put)
        reply = replies.get()
        self.frontend.check_alive()
        return reply

    def checked_call(self, message: CallMessage) -> dict[str, Any]:
        """Return the data of the reply. Raises `InvalidRequestError` if the call was refused,
        `GenerationError` if it failed."""
        reply = self.call(message)
        if reply.data.get("status_code") is not None:
            raise GenerationError(reply.message)
        if not reply.ok:
            raise InvalidRequestError(reply.message, reply.data.get("param"))
        return reply.data
