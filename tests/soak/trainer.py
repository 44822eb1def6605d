"""A trainer beside the clients of a soak: gives the server weights of other policies, in all ways.

Owns the policies and the label of each update, `number:policy`, which answers repeat.
"""

import asyncio
import itertools
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from safetensors.numpy import save, save_file

from sgl_jax.checkpoint.tensor_files import TensorFiles
from tests.live.live_server import DEMO
from tests.soak.refusals import patient_client

# With two, KV of the weights before the last would be that of the served weights.
NUM_POLICIES = 3
FIRST_LABEL = "0:0"
_NOISE = 0.15  # of a tensor's deviation
_NUM_BODIES = 3
_AWAY_S = 0.2


def policy_of(label: str) -> int:
    """Return the number of the policy in a label."""
    return int(label.rpartition(":")[2])


class Round(NamedTuple):
    """One way to update: `pause` is a mode or "", `way` a mode of tensors or "disk"."""

    pause: str
    way: str
    keep_cache: bool = False
    releases: bool = False
    aborts: bool = False


_PAUSES, _WAYS = ("", "abort", "retract", "in_place"), ("staged", "chunked", "disk")
ROUNDS = [
    *(Round(*each) for each in itertools.product(_PAUSES, _WAYS, (False, True))),
    *(Round(pause, way, releases=True) for pause, way in zip(_PAUSES[1:], _WAYS, strict=True)),
    *(Round("", way, aborts=True) for way in _WAYS),
]


class Trainer:
    """The only caller that changes weights.

    Args:
        folder: where the policies are written.
        counts: counts rounds, by what is special about them.

    Attributes:
        label: of the served weights, or of those that are on their way.
        kept: labels of updates with `keep_cache`.
    """

    kinds = (*_PAUSES[1:], *_WAYS, "keep_cache", "releases", "aborts")

    def __init__(self, url: str, folder: Path, counts: Counter[str]) -> None:
        self.label = FIRST_LABEL
        self.kept: set[str] = set()
        self._counts = counts
        self._http = patient_client(url)
        self._numbers = itertools.count(1)
        # In this order the first four have all that is special about some.
        self._rounds = itertools.cycle(random.Random(1000).sample(ROUNDS, len(ROUNDS)))
        self._policies = written_policies(folder)

    async def close(self) -> None:
        await self._http.aclose()

    async def round(self, rng: random.Random) -> None:
        """Serve another policy, in the next way."""
        policy = (policy_of(self.label) + rng.randrange(1, NUM_POLICIES)) % NUM_POLICIES
        way = next(self._rounds)
        await self.serve(policy, way)
        flags = [name for name in ("keep_cache", "releases", "aborts") if getattr(way, name)]
        self._counts.update([way.way, *flags, *filter(None, [way.pause])])

    async def serve(self, policy: int, way: Round) -> None:
        """Give the server weights as a trainer does; raises AssertionError if it refuses."""
        label = f"{next(self._numbers)}:{policy}"
        if way.keep_cache:
            self.kept.add(label)
        if way.pause:
            await self._post("/pause_generation", json={"mode": way.pause})
            if not way.keep_cache:
                await self._post("/flush_cache")
        if way.releases:
            await self._post("/release_memory_occupation", json={})
            await asyncio.sleep(_AWAY_S)
            await self._post("/resume_memory_occupation", json={"tags": ["weights"]})
        self.label = label
        await self._send(policy, way, label)
        if way.releases:
            await self._post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
        if way.pause:
            await self._post("/continue_generation")
        served = (await self._http.get("/model_info")).json()["weight_version"]
        assert served == label, f"{served} is served after the update to {label}"

    async def _send(self, policy: int, way: Round, label: str) -> None:
        settings: dict[str, Any] = {
            "weight_version": label,
            "keep_cache": way.keep_cache,
            "abort_all_requests": way.aborts,
        }
        folder, bodies = self._policies[policy]
        if way.way == "disk":
            await self._post("/update_weights_from_disk", json={"model_path": folder, **settings})
            return
        for number, body in enumerate(bodies, start=1):
            bucket = settings | {"mode": way.way, "is_last": number == len(bodies)}
            await self._post(
                "/update_weights_from_tensor",
                params=bucket,
                content=body,
                headers={"content-type": "application/octet-stream"},
            )

    async def _post(self, path: str, **body: Any) -> None:
        answer: httpx.Response = await self._http.post(path, **body)
        assert answer.status_code == 200, f"{path}: {answer.text}"


def written_policies(folder: Path) -> list[tuple[str, list[bytes]]]:
    """Write a folder for each policy, the demonstration model first. Return its path, and its
    tensors in a few bodies."""
    with TensorFiles(DEMO) as files:
        tensors = {name: files.read(name, ()) for name in files.shapes}
    rng, policies = np.random.default_rng(31), list[tuple[str, list[bytes]]]()
    for number in range(NUM_POLICIES):
        path = folder / f"policy-{number}"
        shutil.copytree(DEMO, path)
        own = {
            name: _changed(tensor, rng) if number else tensor for name, tensor in tensors.items()
        }
        save_file(own, path / "model.safetensors")
        parts = [
            dict(itertools.islice(own.items(), i, None, _NUM_BODIES)) for i in range(_NUM_BODIES)
        ]
        policies.append((str(path), [save(part) for part in parts]))
    return policies


def _changed(tensor: Any, rng: np.random.Generator) -> Any:
    values = tensor.astype(np.float32)
    noise = rng.normal(0, _NOISE * values.std(), tensor.shape)
    return (values + noise).astype(tensor.dtype)
