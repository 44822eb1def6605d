"""The offline API: the engine loop in a thread of this process, without a server.

with Engine(model_path="models/demo") as engine:
    print(engine.generate("The code of Anna is", {"max_new_tokens": 8}).text)
"""

import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, overload

from jax.sharding import Mesh
from tqdm import tqdm

from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.checkpoint.trainer_weights import Weights, in_buckets
from sgl_jax.core.messages import (
    CloseSession,
    ContinueGeneration,
    FlushCache,
    ForkSession,
    GetState,
    ListSessions,
    OpenSession,
    PauseGeneration,
    PauseMode,
    RollbackSession,
)
from sgl_jax.core.request_limits import one_namespace
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.weight_messages import (
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
    UpdateMode,
    UpdateWeightsFromTensor,
)
from sgl_jax.engine.engine_thread import EngineThread
from sgl_jax.engine.front.request_checks import output_scores
from sgl_jax.engine.offline_inputs import (
    Prompt,
    Sampling,
    as_batch,
    as_new_id,
    as_scored,
    check_opening,
)
from sgl_jax.engine.offline_results import Generation
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.text.tokenizer import Tokenizer

# A server refuses requests that would wait too long; offline, the caller waits for all prompts.
_NO_QUEUE_LIMIT = 10_000_000
# Minimum number of prompts for a progress bar.
_MANY_PROMPTS = 16


class Engine:
    """A model ready to generate. Keyword arguments are the fields of `ServerArgs`.

    A prompt is a string or a list of token ids. `sampling_params` is a `SamplingParams` or a
    mapping of its fields: either one for all prompts, or a list with one per prompt. A mapping may
    have `n`: that many samples of the prompt, whose results follow each other.
    """

    def __init__(self, model_path: str = "", **settings: Any) -> None:
        settings.setdefault("max_queued_requests", _NO_QUEUE_LIMIT)
        args = ServerArgs(model_path=model_folder(model_path), **settings)
        if args.num_hosts > 1:
            raise ValueError("an Engine in Python has one host; sgl-jax serve starts several")
        self._engine = EngineThread(args)

    @classmethod
    def on(cls, executor: ModelExecutor, args: ServerArgs) -> "Engine":
        """Return an engine on an executor that was made from `args`, and stays open afterwards."""
        engine = cls.__new__(cls)
        engine._engine = EngineThread(args, executor)
        return engine

    @property
    def info(self) -> dict[str, Any]:
        return self._engine.core.info

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the engine's devices, with the axes data and tensor."""
        return self._engine.core.executor.mesh

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the model's checkpoint, which `update_weights` takes."""
        return self._engine.core.executor.weights.tensor_shapes

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.frontend.tokenizer

    @overload
    def generate(
        self, prompts: str, sampling_params: Sampling = None, **options: Any
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt] | None = None,
        sampling_params: Sampling | Sequence[Sampling] = None,
        **options: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: str | Sequence[Prompt] | None = None,
        sampling_params: Sampling | Sequence[Sampling] = None,
        *,
        input_ids: Sequence[Sequence[int]] | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Generate for one prompt or many, and wait for all.

        Args:
            prompts: a string, or a list of strings or token id lists.
            sampling_params: one value for all prompts, or a list with one per prompt.
            input_ids: token id lists, instead of `prompts`.
            progress: show a progress bar; None shows it for many prompts on a terminal.
            options: `rid`, `return_logprob`, `top_logprobs_num`, `token_ids_logprob`,
                `logprob_start_len`, `logprobs_mode`, `dp_rank`, `return_routed_experts`,
                `return_hidden_states`.
                `image_data`: with a single prompt, an image or a list of them, Pillow's or uint8
                arrays [height, width, 3]; else a list with the images of each prompt. They replace
                the prompt's placeholders in order.
                One value or a list with one per prompt: `priority`, `routed_experts_start_len`, and
                `extra_key` or `cache_salt` (a namespace of cached prefixes). With a single prompt:
                `session_params`, a `SessionTurn` or a mapping of its fields (`{"id": ...}`). With
                `max_new_tokens` 0: `return_hidden`.

        Raises:
            InvalidRequestError: a prompt or parameter cannot be served. Nothing was started, except
                if a grammar cannot be compiled: then all other prompts are aborted.
            GenerationError: a step failed, or the engine refused a request. The engine continues.
            EngineDeadError: the engine ended.
        """
        batch = as_batch(prompts, sampling_params, input_ids, options)
        results = self._generate_all(*batch, progress)
        return results[0] if isinstance(prompts, str) and len(results) == 1 else results

    def as_completed(
        self,
        prompts: str | Sequence[Prompt] | None = None,
        sampling_params: Sampling | Sequence[Sampling] = None,
        *,
        input_ids: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield each result of `generate` as soon as it is there, with its index in the list.

        Leaving the loop early ends the other requests in the engine.
        """
        batch = as_batch(prompts, sampling_params, input_ids, options)
        yield from self._engine.completed(*batch)

    def score(
        self,
        prompt_ids: Sequence[Sequence[int]],
        output_ids: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        min_p: float = 0.0,
        progress: bool | None = None,
        **options: Any,
    ) -> list[list[float]]:
        """Return the log-probabilities of given outputs, one per token, as generating them reports.

        Args:
            prompt_ids, output_ids: token ids, at least one of each.
            temperature, top_k, top_p, min_p: of the distribution, by `logprobs_mode`. Penalties and
                bias do not count.
            options: as for `generate`, without a session.

        Raises:
            InvalidRequestError, GenerationError, EngineDeadError: as for `generate`.
        """
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        batch = as_scored(prompt_ids, output_ids, sampling, options)
        results = self._generate_all(*batch, progress)
        return [output_scores(each.prompt_logprobs, each.logprobs) for each in results]

    def _generate_all(
        self,
        batch: Sequence[Prompt],
        params: Sequence[Sampling],
        options: Sequence[Mapping[str, Any]],
        progress: bool | None,
    ) -> list[Generation]:
        if progress is None:
            progress = len(batch) >= _MANY_PROMPTS and sys.stderr.isatty()
        ended = self._engine.completed(batch, params, options)
        results = dict(tqdm(ended, total=len(batch), disable=not progress, unit="prompt"))
        return [results[i] for i in range(len(batch))]

    def stream(
        self, prompt: Prompt, sampling_params: Sampling = None, **options: Any
    ) -> Iterator[Generation]:
        """Generate for one prompt, and yield the whole output so far each time it has grown.

        Leaving the loop early ends the request in the engine.
        """
        return self._engine.outputs(prompt, sampling_params, options)

    async def async_generate(
        self, prompt: Prompt, sampling_params: Sampling = None, **options: Any
    ) -> Generation:
        """Run `generate` for one prompt without blocking the event loop."""
        latest = None
        outputs = self._engine.async_outputs(prompt, sampling_params, options, streaming=False)
        async for so_far in outputs:
            latest = so_far
        assert latest is not None, "a stream ends with a finish reason"
        return latest

    async def async_stream(
        self, prompt: Prompt, sampling_params: Sampling = None, **options: Any
    ) -> AsyncIterator[Generation]:
        """Run `stream` without blocking the event loop."""
        outputs = self._engine.async_outputs(prompt, sampling_params, options, streaming=True)
        async for so_far in outputs:
            yield so_far

    def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        *,
        streaming: bool = False,
        timeout: float | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Open a session and return its id, which is new if `session_id` is None.

        Args:
            capacity_of_str_len: maximum tokens of the history; 0: only the context's limit.
            streaming: append-only, one request in flight, KV kept in place between turns.
            timeout: idle seconds after which the session is closed; None: never.
            extra_key, cache_salt: namespace of cached prefixes for all its turns; set one of them.

        Raises:
            InvalidRequestError: the id is in use, or an argument is invalid.
            GenerationError: too many sessions are open.
        """
        name, namespace = as_new_id(session_id), one_namespace(extra_key, cache_salt)
        opening = OpenSession(
            session_id=name,
            streaming=streaming,
            capacity_of_str_len=capacity_of_str_len,
            timeout_s=timeout,
            namespace=namespace,
        )
        check_opening(opening)
        self._engine.checked_call(opening)
        return name

    def close_session(self, session_id: str) -> None:
        """Close a session after a turn in flight has ended."""
        self._engine.checked_call(CloseSession(session_id=session_id))

    def rollback_session(self, session_id: str, num_turns: int) -> dict[str, Any]:
        """Roll a streaming session back to the end of its first `num_turns` turns.

        Returns the session's new `num_turns` and `num_tokens`.
        """
        return self._engine.checked_call(
            RollbackSession(session_id=session_id, num_turns=num_turns)
        )

    def fork_session(self, session_id: str, new_session_id: str | None = None) -> str:
        """Open a streaming session with the history of session `session_id`, and return its id.

        Raises `InvalidRequestError` if the new id is in use or invalid, or the other session is
        missing, not streaming, or has a turn in flight. Raises `GenerationError` if too many
        sessions are open.
        """
        name = as_new_id(new_session_id)
        self._engine.checked_call(ForkSession(session_id=session_id, new_session_id=name))
        return name

    def list_sessions(self) -> list[dict[str, Any]]:
        """Return all open sessions, as dictionaries with the fields of `SessionEntry`."""
        sessions: list[dict[str, Any]] = self._engine.checked_call(ListSessions())["sessions"]
        return sessions

    def check_health(self) -> float:
        """Return the seconds since the engine loop began its current turn.

        Raises:
            EngineDeadError: the engine ended.
            EngineStuckError: it has been silent for longer than `engine_heartbeat_timeout`.
        """
        self._engine.frontend.check_alive()
        self._engine.health.check()
        return self._engine.health.turn_s or 0.0

    def server_info(self) -> dict[str, Any]:
        """Return the memory view of each rank, and counters."""
        return self._engine.call(GetState()).data

    def flush_cache(self) -> bool:
        """Empty the prefix caches. Return False while requests are running."""
        return self._engine.call(FlushCache()).ok

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Run no step until `continue_generation`; `PauseGeneration` explains the modes."""
        self._engine.checked_call(PauseGeneration(mode=mode))

    def continue_generation(self) -> None:
        """Run steps again after `pause_generation`."""
        self._engine.checked_call(ContinueGeneration())

    def update_weights(
        self,
        weights: Weights,
        *,
        version: str,
        mode: UpdateMode = "staged",
        is_first: bool = True,
        is_last: bool = True,
        keep_cache: bool = False,
        abort_all_requests: bool = False,
    ) -> int:
        """Serve weights from arrays of this process; return once the next step reads them.

        Args:
            weights: a tree of arrays, or an iterator of pairs (name, array), with the names of the
                model's checkpoint or of tunix. Arrays may be on any mesh, and may be donated after
                this call; those of an iterator, after the next is taken.
            version: a label of these weights, for answers.
            mode: `staged` serves the old weights until the new weights are complete, and needs room
                for both; `chunked` replaces one parameter at a time, while no step runs.
            is_first: False continues an update of the same version that was called with `is_last`
                False.
            is_last: False keeps the new weights without serving them, even if they are complete.
            keep_cache: let requests that decode go on with their KV of the old weights; their
                results have `has_old_kv`. Otherwise they are retracted. No other request uses it.
            abort_all_requests: end all requests.

        Returns:
            The number of tensors that are missing, which is 0 with `is_last`.

        Raises:
            InvalidRequestError: a tensor is missing, unknown, misshapen or not finite. The old
                weights stay; in mode chunked, generation is paused until another update succeeds.
        """
        num_missing = 0
        for number, (bucket, ends) in enumerate(in_buckets(weights)):
            message = UpdateWeightsFromTensor(
                tensors=bucket,
                weight_version=version,
                mode=mode,
                is_first=is_first and number == 0,
                is_last=is_last and ends,
                keep_cache=keep_cache,
                abort_all_requests=abort_all_requests,
            )
            num_missing = self._engine.checked_call(message).get("num_missing", 0)
        return num_missing

    def release_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Delete `weights` or `kv_cache` on the devices, or both. Requests wait."""
        self._engine.checked_call(ReleaseMemory(tags=list(tags) if tags else None))

    def resume_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Allocate `kv_cache` again. Weights come with the next `update_weights`."""
        self._engine.checked_call(ResumeMemory(tags=list(tags) if tags else None))

    def shutdown(self) -> None:
        """End the engine and free its memory. Requests in flight end with an abort."""
        self._engine.shutdown()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
