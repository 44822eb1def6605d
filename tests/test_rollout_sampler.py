"""A worker of tunix's head draws samples from an engine, and brings it new weights in rounds."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest

from sgl_jax import Engine
from sgl_jax.checkpoint.tensor_files import TensorFiles
from sgl_jax.core.errors import InvalidRequestError
from sgl_jax.rollout_sampler import SamplingResponse, TunixSampler
from tests.support.waiting import meanwhile_until

FOLDER = Path(__file__).parent / "golden" / "qwen3"
PROMPT = [5, 6, 7]


@runtime_checkable
class Sampler(Protocol):
    """The protocol of tunix's head, of which a check by `isinstance` reads the names."""

    def initialize(self) -> None: ...
    async def start(self, **kwargs: Any) -> Any: ...
    async def stop(self, **kwargs: Any) -> Any: ...
    async def pause(self, **kwargs: Any) -> Any: ...
    async def resume(self, **kwargs: Any) -> Any: ...
    async def get_mesh(self, **kwargs: Any) -> Any: ...
    async def sample(self, sampling_requests: Any, **kwargs: Any) -> Any: ...
    def get_target_state(self) -> Any: ...
    async def get_weight_sync_metadata(self, **kwargs: Any) -> Any: ...
    async def bind_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def abort_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Any: ...
    async def get_transfer_status(self, req_id: Any, **kwargs: Any) -> Any: ...
    async def migrate_kv_cache(self, *servers: Any, **kwargs: Any) -> bool: ...
    async def get_load_info(self, **kwargs: Any) -> Any: ...


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings: dict[str, Any] = {
        "page_size": 4,
        "max_total_tokens": 480,
        "max_running_requests": 2,
        "chunked_prefill_size": 16,
        "warmup": "none",
        "check_memory": "busy",
    }
    with Engine(str(FOLDER), **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def old() -> dict[str, Any]:
    with TensorFiles(FOLDER) as files:
        return {name: files.read(name, ()) for name in files.shapes}


@pytest.fixture(scope="module")
def new(old: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        name: own + rng.normal(0, 0.05, own.shape).astype(own.dtype) for name, own in old.items()
    }


def request(prompt: Any, request_id: str = "r", **params: Any) -> Any:
    """A request of tunix with its defaults."""
    defaults = {"max_tokens": 8, "temperature": 0.0, "top_p": None, "top_k": None, "seed": None}
    fields = SimpleNamespace(**defaults | {"return_logprobs": True} | params)
    return SimpleNamespace(prompt=prompt, request_id=request_id, sampling_params=fields)


def of_round(uuid: int, weights: Any = None, req_id: str = "") -> Any:
    config = {"uuid": uuid, "req_id": req_id or f"round-{uuid}"}
    return SimpleNamespace(policy_version=10 * uuid, weights=weights, extra_config=config)


def greedy(engine: Engine) -> tuple[list[int], str]:
    """The output of the weights that serve, and their version."""
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    (result,) = engine.generate([PROMPT], sampling)
    return result.output_ids, result.weight_versions[0][1]


def test_a_request_gets_a_response_and_a_list_gets_a_list(engine: Engine) -> None:
    async def run(sampler: TunixSampler) -> None:
        bare = await sampler.sample(request(PROMPT, "one"))
        assert isinstance(bare, SamplingResponse)
        assert bare.request_id == "one"
        assert bare.prompt_token_ids.tolist() == PROMPT
        assert bare.logprobs is not None
        assert bare.logprobs.shape == bare.token_ids.shape == (8,)
        assert (bare.finish_reason, bare.error) == ("length", None)
        (score,) = engine.score([PROMPT], [bare.token_ids.tolist()], temperature=0.0)
        np.testing.assert_allclose(bare.logprobs, score, atol=2e-5)

        prompts = [np.array(PROMPT), {"prompt_token_ids": PROMPT}, tuple(PROMPT)]
        many = await sampler.sample([request(prompt) for prompt in prompts])
        assert [each.token_ids.tolist() for each in many] == [bare.token_ids.tolist()] * 3
        for prompt in (PROMPT, tuple(PROMPT), list(np.array(PROMPT))):
            assert (await sampler.sample(prompt)).prompt_token_ids.tolist() == PROMPT
        batch = await sampler.sample([{"prompt_token_ids": PROMPT}, PROMPT])
        assert [each.prompt_token_ids.tolist() for each in batch] == [PROMPT] * 2
        assert await sampler.sample([]) == []
        seeded = [request(PROMPT, temperature=1.5, seed=seed) for seed in (3, 3, 4)]
        first, again, other = [own.token_ids.tolist() for own in await sampler.sample(seeded)]
        assert first == again != other

    assert isinstance(TunixSampler(), Sampler)
    asyncio.run(run(TunixSampler(engine=engine)))


def test_what_cannot_be_served_is_an_error_of_its_response(engine: Engine) -> None:
    async def run(sampler: TunixSampler) -> None:
        wrong = [request([9999]), request(PROMPT, return_routed_experts=True)]
        outside, dense, good = await sampler.sample([*wrong, request(PROMPT)])
        assert outside.finish_reason == dense.finish_reason == "error"
        assert "outside the vocabulary" in outside.error
        assert "no experts" in dense.error
        assert good.error is None
        for params in ({"return_logits": True}, {"beam_size": 2}):
            with pytest.raises(ValueError, match="no logits and has no beam"):
                await sampler.sample(request(PROMPT, **params))
        with pytest.raises(ValueError, match="needs the sampler's tokenizer"):
            await sampler.sample(request([{"role": "user", "content": "hi"}]))
        with pytest.raises(RuntimeError, match="initialize"):
            await TunixSampler().sample(request("hi"))
        chats = SimpleNamespace(apply_chat_template=lambda chat, **_: [len(chat), *PROMPT])
        sampler = TunixSampler(engine=engine, tokenizer=chats)
        for chat in (request([{}, {}]), [{}, {}]):
            assert (await sampler.sample(chat)).prompt_token_ids.tolist() == [2, *PROMPT]

    asyncio.run(run(TunixSampler(engine=engine)))


def test_a_round_publishes_its_weights_once(engine: Engine, new: dict[str, Any]) -> None:
    of_old, version = greedy(engine)

    async def run(sampler: TunixSampler) -> None:
        first = of_round(1, new)
        await sampler.bind_weight_sync()
        (unit,) = await sampler.get_weight_sync_metadata()
        assert {own["name"]: own["shape"] for own in unit["variables"]} == {
            name: own.shape for name, own in new.items()
        }
        running = asyncio.create_task(sampler.sample(request(PROMPT, max_tokens=60)))
        await asyncio.sleep(0)
        for _ in range(2):
            await sampler.pre_weight_sync(first)
        assert running.done(), "samples in flight end first"
        waiting = asyncio.create_task(sampler.sample(request(PROMPT)))
        for _ in range(2):
            await sampler.weight_sync(first)
        assert await sampler.get_transfer_status("round-1") == "SUCCESS"
        assert await sampler.get_transfer_status("round-2") == "UNKNOWN"
        assert not waiting.done()
        changes = engine._engine.frontend.num_weight_changes
        for _ in range(2):
            await sampler.post_weight_sync(first)
        assert engine._engine.frontend.num_weight_changes == changes + 1
        response = await waiting
        of_new, published = greedy(engine)
        assert response.token_ids.tolist() == of_new != of_old
        assert (version, published) == ("default", "10")
        with pytest.raises(ValueError, match="cannot be aborted: it is published"):
            await sampler.abort_weight_sync(first)
        with pytest.raises(ValueError, match="the round is"):
            await sampler.pre_weight_sync(of_round(0))
        with pytest.raises(ValueError, match="the round is"):
            await sampler.post_weight_sync(of_round(1, req_id="another"))

    asyncio.run(run(TunixSampler(engine=engine)))


def test_a_round_has_the_version_of_its_weights_and_may_bring_them_again(
    engine: Engine, old: dict[str, Any], new: dict[str, Any]
) -> None:
    async def run(sampler: TunixSampler) -> None:
        own, end = of_round(1, new), of_round(1)
        del end.policy_version
        await sampler.pre_weight_sync(own)
        await sampler.weight_sync(own)
        engine.update_weights(old, version="other")  # drops the new weights
        with pytest.raises(InvalidRequestError, match="is missing"):
            await sampler.post_weight_sync(end)
        await sampler.weight_sync(own)
        await sampler.post_weight_sync(end)
        assert greedy(engine)[1] == "10"

    asyncio.run(run(TunixSampler(engine=engine)))


def test_no_wait_for_samples_keeps_others_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = engine.async_generate

    async def run(sampler: TunixSampler) -> None:
        starts = asyncio.Event()

        async def start(*args: Any, **options: Any) -> Any:
            await starts.wait()
            return await usual(*args, **options)

        monkeypatch.setattr(engine, "async_generate", start)
        running = asyncio.create_task(sampler.sample(request(PROMPT)))
        await asyncio.sleep(0)
        preparing = asyncio.create_task(sampler.pre_weight_sync(of_round(1)))
        await meanwhile_until(lambda: not sampler._is_open, "the round waits for the sample")
        await sampler.pause()
        await asyncio.wait_for(sampler.abort_weight_sync(of_round(1)), 20)
        with pytest.raises(ValueError, match="was aborted"):
            await preparing
        with pytest.raises(ValueError, match="paused"):
            await asyncio.wait_for(sampler.pre_weight_sync(of_round(2)), 20)
        await sampler.resume()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.pre_weight_sync(of_round(2)), 0.1)
        starts.set()
        await asyncio.wait_for(sampler.sample(request(PROMPT)), 20)
        await running
        release = engine.release_memory_occupation

        def fail(tags: Any) -> None:
            release(tags)
            raise RuntimeError("as the call ends")

        monkeypatch.setattr(engine, "release_memory_occupation", fail)
        with pytest.raises(RuntimeError, match="as the call ends"):
            await sampler.pre_weight_sync(of_round(2))
        await asyncio.wait_for(sampler.sample(request(PROMPT)), 20)

    try:
        asyncio.run(run(TunixSampler(engine=engine)))
    finally:
        engine.continue_generation()


def test_an_aborted_round_leaves_the_weights_as_they_are(
    engine: Engine, old: dict[str, Any], new: dict[str, Any]
) -> None:
    engine.update_weights(old, version="before")
    before = greedy(engine)

    async def run(sampler: TunixSampler) -> None:
        phases = [sampler.pre_weight_sync, sampler.weight_sync]
        for uuid, num_phases in ((1, 0), (2, 1), (3, 2)):
            own = of_round(uuid, new)
            for phase in phases[:num_phases]:
                await phase(own)
            for _ in range(2):
                await sampler.abort_weight_sync(own)
            assert greedy(engine) == before
            with pytest.raises(ValueError, match="it is aborted"):
                await sampler.post_weight_sync(own)
        bad = {name: own for name, own in new.items() if name != "lm_head.weight"}
        await sampler.pre_weight_sync(of_round(4, bad))
        with pytest.raises(InvalidRequestError, match="1 tensors are missing"):
            await sampler.weight_sync(of_round(4, bad))
        with pytest.raises(InvalidRequestError, match=f"{len(new)} tensors are missing"):
            await sampler.weight_sync(of_round(4, {}))
        with pytest.raises(ValueError, match="it is prepared"):
            await sampler.post_weight_sync(of_round(4, bad))
        with pytest.raises(ValueError, match="needs the arrays"):
            await sampler.weight_sync(of_round(4))
        with pytest.raises(ValueError, match="the round is"):
            await sampler.weight_sync(of_round(5, new))
        # The round before never ended; its weights must not be published.
        await sampler.weight_sync(of_round(4, new))
        await sampler.pre_weight_sync(of_round(5, old))
        await sampler.weight_sync(of_round(5, old))
        await sampler.post_weight_sync(of_round(5, old))
        assert greedy(engine) == (before[0], "50")
        load = await sampler.get_load_info()
        assert (load.num_requests_running, load.num_requests_waiting) == (0, 0)
        assert (await sampler.get_mesh()).axis_names == ("data", "tensor")
        assert not await sampler.migrate_kv_cache("a", "b", [1], route_key="c")

    asyncio.run(run(TunixSampler(engine=engine)))


def test_it_starts_pauses_and_stops_its_own_engine() -> None:
    async def run() -> None:
        sampler = TunixSampler(model_path=str(FOLDER), warmup="none", max_total_tokens=480)
        await sampler.start()
        assert sampler.get_target_state()["model.norm.weight"].shape == (64,)
        await sampler.pause()
        waiting = asyncio.create_task(sampler.sample(np.array(PROMPT)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await sampler.stop()
        assert (await waiting).finish_reason in ("cancelled", "error")

    asyncio.run(run())


@pytest.mark.long
def test_experts_come_from_the_start_that_is_asked_for() -> None:
    settings: dict[str, Any] = {"warmup": "none", "max_total_tokens": 480}
    folder = FOLDER.with_name("qwen3_moe")
    with Engine(str(folder), enable_return_routed_experts=True, **settings) as engine:
        asked = request(PROMPT, return_routed_experts=True, routed_experts_prompt_start=2)
        response = asyncio.run(TunixSampler(engine=engine).sample(asked))
        sampling = {"max_new_tokens": 8, "temperature": 0.0}
        (own,) = engine.generate([PROMPT], sampling, return_routed_experts=True)
    np.testing.assert_array_equal(response.routed_experts, own.routed_experts[2:])
    assert len(response.routed_experts) == len(PROMPT) + len(own.output_ids) - 1 - 2
