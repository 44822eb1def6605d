"""A sampler for the rollout workers of tunix's head (`tunix.experimental.rollout.sampler.Sampler`).

    sampler = TunixSampler(model_path="models/demo", dtype="float32")
    RolloutWorker("worker", config, sampler=sampler, ...)

Does not import tunix: requests are read, and responses written, by the names of their attributes.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.step_plan import Float32Array, Int32Array
from sgl_jax.engine.offline import Engine
from sgl_jax.engine.offline_results import GenerationError
from sgl_jax.metrics.rank_state import token_usage

_FINISH = {"stop": "stop", "length": "length", "abort": "cancelled"}
_MAX_TOKENS = 64  # tunix's default
# Of a round of weights. The KV pools are missing from "prepared" to the last.
_Phase = Literal["none", "prepared", "staged", "switched", "published", "aborted"]
# For each call, by the phase it leads to: the phases in which repeating it has no effect, and the
# phases in which it may be made. In all others it is refused.
_PHASES: dict[_Phase, tuple[tuple[_Phase, ...], tuple[_Phase, ...]]] = {
    "prepared": (("prepared", "staged", "switched", "published"), ("none",)),
    "staged": (("staged", "switched", "published"), ("prepared",)),
    "published": (("published",), ("staged", "switched")),
    "aborted": (("aborted",), ("none", "prepared", "staged")),
}


@dataclass(kw_only=True)
class SamplingResponse:
    """One completion; `error` is None unless it failed."""

    request_id: str = ""
    prompt_token_ids: Int32Array
    token_ids: Int32Array
    text: str = ""
    logprobs: Float32Array | None = None  # of the sampled distribution, one per token
    finish_reason: str  # stop, length, cancelled or error
    routed_experts: Int32Array | None = None  # [tokens, layers, top_k]
    error: str | None = None


@dataclass(kw_only=True)
class LoadInfo:
    """The load of an engine, over all ranks."""

    num_requests_waiting: int
    num_requests_running: int
    kv_cache_usage_perc: float  # the fullest rank's share, in [0, 1]


class TunixSampler:
    """An `Engine` as the sampler of a rollout worker.

    A round of weights has the phases `pre_weight_sync`, `weight_sync` and `post_weight_sync`, or
    ends by `abort_weight_sync`. Requests have the round in `extra_config`: `req_id`, and `uuid`,
    which rises from round to round. A repeated phase has no effect, and older rounds are refused.

    Args:
        tokenizer: encodes prompts, and renders chats by `apply_chat_template`; None: the model's,
            without chats.
        engine: the engine; None: `initialize` makes one.
        settings: arguments of the new engine, as of `Engine`.
    """

    supports_token_input = True  # a later turn may have the token ids of the turns before

    def __init__(
        self, *, tokenizer: Any = None, engine: Engine | None = None, **settings: Any
    ) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._settings = settings
        self._round: tuple[int, str] = (-1, "")
        self._phase: _Phase = "none"
        self._has_staged = False  # the engine may hold new weights
        self._version = ""  # of the weights of the last weight_sync
        self._in_phase = asyncio.Lock()
        # Samples are admitted while it is True, and counted until they end.
        self._is_open = True
        self._num_open = 0
        self._changed = asyncio.Condition()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the sampler needs initialize() first")
        return self._engine

    def initialize(self) -> None:
        """Make the engine, unless there is one."""
        if self._engine is None:
            self._engine = Engine(**self._settings)

    async def start(self, **_: object) -> None:
        """Make the engine, unless there is one."""
        await asyncio.to_thread(self.initialize)

    async def stop(self, **_: object) -> None:
        """End the engine. Samples in flight end as cancelled."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    async def pause(self, **_: object) -> None:
        """Run no step until `resume`; samples keep their memory."""
        await asyncio.to_thread(self.engine.pause_generation, "in_place")

    async def resume(self, **_: object) -> None:
        """Run steps again after `pause`."""
        await asyncio.to_thread(self.engine.continue_generation)

    async def get_mesh(self, **_: object) -> jax.sharding.Mesh:
        """Return the mesh of the engine's devices, with the axes data and tensor."""
        return self.engine.mesh

    async def get_load_info(self, **_: object) -> LoadInfo:
        """Return the numbers of requests, and how full the KV pools are."""
        ranks = (await asyncio.to_thread(self.engine.server_info))["ranks"]
        return LoadInfo(
            num_requests_waiting=sum(rank["num_waiting"] for rank in ranks),
            num_requests_running=sum(rank["num_running"] for rank in ranks),
            kv_cache_usage_perc=max(map(token_usage, ranks)),
        )

    async def migrate_kv_cache(self, *_: object, **__: object) -> bool:
        """Return False: there is no other sampler to move a cache to."""
        return False

    # Samples

    async def sample(self, sampling_requests: Any, **_: object) -> Any:
        """Return the response to one request, or a list of responses to a list of requests.

        A request has `prompt` (a string, token ids, or a chat), `sampling_params` and `request_id`,
        or is only a prompt. While weights are exchanged, requests wait. A list of integers or of
        messages is one prompt.

        Raises ValueError for logits or beams, which the engine does not return.
        """
        if _is_batch(sampling_requests):
            return list(await asyncio.gather(*map(self._sample, sampling_requests)))
        return await self._sample(sampling_requests)

    async def _sample(self, request: Any) -> SamplingResponse:
        params = getattr(request, "sampling_params", None)
        sampling = _as_sampling(params)
        ids = self._encode(getattr(request, "prompt", request))
        options: dict[str, Any] = {"return_logprob": getattr(params, "return_logprobs", False)}
        if getattr(params, "return_routed_experts", False):
            start = getattr(params, "routed_experts_prompt_start", 0)
            options |= {"return_routed_experts": True, "routed_experts_start_len": start}
        named: dict[str, Any] = {
            "request_id": getattr(request, "request_id", ""),
            "prompt_token_ids": np.array(ids, np.int32),
        }
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_open)
            self._num_open += 1
        try:
            result = await self.engine.async_generate(ids, sampling, **options)
        except (InvalidRequestError, GenerationError) as error:
            none = np.zeros(0, np.int32)
            return SamplingResponse(
                **named, token_ids=none, finish_reason="error", error=str(error)
            )
        finally:
            async with self._changed:
                self._num_open -= 1
                self._changed.notify_all()
        assert result.finish_reason is not None
        logprobs = [token.logprob for token in result.logprobs]
        return SamplingResponse(
            **named,
            token_ids=np.array(result.output_ids, np.int32),
            text=result.text,
            logprobs=np.array(logprobs, np.float32) if options["return_logprob"] else None,
            finish_reason=_FINISH[result.finish_reason.type],
            routed_experts=result.routed_experts,
        )

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
        if isinstance(prompt, str):
            ids: Sequence[int] = (self._tokenizer or self.engine.tokenizer).encode(prompt)
            return list(ids)
        chat = [prompt] if isinstance(prompt, dict) else prompt
        if len(chat) and isinstance(chat[0], dict):
            if self._tokenizer is None:
                raise ValueError("a chat needs the sampler's tokenizer")
            ids = self._tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            return list(ids)
        flat: list[int] = np.asarray(chat, np.int32).reshape(-1).tolist()
        return flat

    # Rounds of weights

    def get_target_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the checkpoint's tensors that `weight_sync` takes.

        `weight_sync` also takes arrays of other float dtypes, which it converts, arrays with
        tunix's names, and the other forms of a parameter that a checkpoint may have.
        """
        dtype = np.dtype(self.engine.info["dtype"])
        shapes = self.engine.weight_shapes
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}

    async def bind_weight_sync(self, sync_request: Any = None, **_: object) -> None:
        """Do nothing: `weight_sync` gets arrays of this process."""

    async def get_weight_sync_metadata(self, **_: object) -> list[dict[str, Any]]:
        """Return the tensors of one destination, each whole, as fields of tunix's
        `WorkUnitMetadata`."""
        variables = [
            {
                "name": name,
                "shape": own.shape,
                "mesh_shape": (1,) * own.ndim,
                "layout": tuple(reversed(range(own.ndim))),
                "item_size": own.dtype.itemsize,
                "sharding_spec": ("",) * own.ndim,
            }
            for name, own in self.get_target_state().items()
        ]
        mesh = self.engine.mesh
        return [
            {
                "unit": {"job_name": "sgl_jax"},
                "mesh_shape": mesh.devices.shape,
                "mesh_axes": mesh.axis_names,
                "variables": variables,
            }
        ]

    async def pre_weight_sync(self, sync_request: Any = None, **_: object) -> None:
        """Admit no sample, wait for those in flight, and free the cache and the KV pools.

        If that fails or is cancelled, samples are admitted again. Raises ValueError if samples in
        flight are paused, or the round is aborted meanwhile.
        """
        async with self._in_phase:
            if not self._begins(sync_request, "prepared"):
                return
            if self._num_open and self.engine.info["is_paused"]:
                raise ValueError("samples in flight are paused, and cannot end: call resume first")
            try:
                await self._prepare()
            except BaseException:
                await self._admit()  # first, for the engine may have ended
                await asyncio.to_thread(self.engine.resume_memory_occupation, ["kv_cache"])
                raise
            self._phase = "prepared"

    async def _prepare(self) -> None:
        self._is_open = False
        await asyncio.to_thread(self._drop_staged)  # of an earlier round that did not end
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_open or not self._num_open)
        if self._is_open:
            raise ValueError(f"{self._round} was aborted")
        await asyncio.to_thread(self.engine.release_memory_occupation, ["kv_cache"])

    async def weight_sync(self, sync_request: Any = None, **_: object) -> None:
        """Copy and check the new weights, `sync_request.weights`, next to the served weights.

        Raises InvalidRequestError if a tensor is missing, unknown, misshapen or not finite.
        """
        async with self._in_phase:
            if not self._begins(sync_request, "staged"):
                return
            weights = getattr(sync_request, "weights", None)
            if weights is None:
                raise ValueError("weight_sync needs the arrays in sync_request.weights")
            self._has_staged = True
            self._version = str(getattr(sync_request, "policy_version", 0))
            num_missing = await asyncio.to_thread(
                self.engine.update_weights, weights, version=self._version, is_last=False
            )
            if num_missing:
                await asyncio.to_thread(self._drop_staged)
                raise InvalidRequestError(f"{num_missing} tensors are missing", "weights")
            self._phase = "staged"

    async def post_weight_sync(self, sync_request: Any = None, **_: object) -> None:
        """Serve the new weights, allocate the KV pools, and admit samples again.

        If the new weights cannot be served, `weight_sync` must bring them again.
        """
        async with self._in_phase:
            if not self._begins(sync_request, "published"):
                return
            if self._phase == "staged":
                try:
                    await asyncio.to_thread(
                        self.engine.update_weights, {}, version=self._version, is_first=False
                    )
                except BaseException:
                    self._phase = "prepared"
                    raise
                self._phase, self._has_staged = "switched", False
            await self._serve_again("published")

    async def abort_weight_sync(self, sync_request: Any = None, **_: object) -> None:
        """End a round: the old weights serve again. A published round cannot be aborted."""
        number = _round_of(sync_request)
        if self._phase == "none" and (number == self._round or number[0] > self._round[0]):
            await self._admit()  # ends the wait of pre_weight_sync
        async with self._in_phase:
            if not self._begins(sync_request, "aborted"):
                return
            await asyncio.to_thread(self._drop_staged)
            await self._serve_again("aborted")

    async def get_transfer_status(self, req_id: str, **_: object) -> str:
        """Return SUCCESS if the weights of the round `req_id` have arrived, or else UNKNOWN."""
        has_arrived = self._phase in ("staged", "switched", "published")
        return "SUCCESS" if has_arrived and req_id == self._round[1] else "UNKNOWN"

    async def _serve_again(self, phase: _Phase) -> None:
        await asyncio.to_thread(self.engine.resume_memory_occupation, ["kv_cache"])
        await self._admit()
        self._phase = phase

    async def _admit(self) -> None:
        async with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def _drop_staged(self) -> None:
        """Free the new weights that were not published."""
        if self._has_staged:
            self.engine.update_weights({}, version="", is_last=False)
            self._has_staged = False

    def _begins(self, request: Any, phase: _Phase) -> bool:
        """Return whether `phase` of the round of `request` is to be done: False if it was. Only
        `prepared` and `aborted` begin a newer round. Raises ValueError if the round is older, or
        not so far."""
        number = _round_of(request)
        if number != self._round:
            if number[0] <= self._round[0] or phase not in ("prepared", "aborted"):
                raise ValueError(f"{number} cannot be {phase}: the round is {self._round}")
            self._round, self._phase = number, "none"
        done, possible = _PHASES[phase]
        if self._phase not in done + possible:
            raise ValueError(f"{number} cannot be {phase}: it is {self._phase}")
        return self._phase not in done


def _is_batch(requests: Any) -> bool:
    """Return whether `requests` is a list, but not the token ids or messages of one prompt."""
    if not isinstance(requests, list | tuple):
        return False
    first = requests[0] if requests else None
    is_message = isinstance(first, dict) and "prompt_token_ids" not in first
    return not is_message and not isinstance(first, int | np.integer)


def _as_sampling(params: Any) -> SamplingParams:
    """Convert tunix's parameters; None: its defaults."""
    if getattr(params, "return_logits", False) or (getattr(params, "beam_size", None) or 1) > 1:
        raise ValueError("TunixSampler returns no logits and has no beam search")
    top_p, top_k = getattr(params, "top_p", None), getattr(params, "top_k", None)
    return SamplingParams(
        max_new_tokens=getattr(params, "max_tokens", _MAX_TOKENS),
        temperature=getattr(params, "temperature", 1.0),
        top_p=1.0 if top_p is None else top_p,
        top_k=-1 if top_k is None else top_k,
        seed=getattr(params, "seed", None),
    )


def _round_of(request: Any) -> tuple[int, str]:
    """Return the round of a request: its uuid, by default the version of the policy, and id."""
    config = getattr(request, "extra_config", None) or {}
    uuid = config.get("uuid", getattr(request, "policy_version", 0))
    return int(uuid), str(config.get("req_id", getattr(request, "request_id", "")))
