"""The gated delta rule and the convolution in float64 numpy, token by token: the judge.

It shares no code with the implementations, and takes a step as the engine plans it, without chunks.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


class Step(NamedTuple):
    """One step's arguments of `StateBatch.build`."""

    slots_in: NDArray[np.int32]  # [B]
    slots_out: NDArray[np.int32]  # [B]
    snapshots: NDArray[np.int32]  # [S, 3] row, length, slot
    kv_starts: NDArray[np.int32]  # [B]
    q_lens: NDArray[np.int32]  # [B]
    num_decode: int

    def slots_after(self, row: int, i: int) -> list[int]:
        """The slots to which the state after token i of a row's tokens of this step is written."""
        if row < self.num_decode:
            return [int(self.slots_out[row]) + i]
        slots = [int(self.slots_out[row])] if i == self.q_lens[row] - 1 else []
        length = self.kv_starts[row] + i + 1
        kept = (s for r, n, s in self.snapshots if s > 0 and r == row and n == length)
        return slots + [int(slot) for slot in kept]


def run_tokens(
    step: Step, states: Float64Array, token: Callable[[int, Float64Array], Float64Array]
) -> None:
    """Call token(t, state) for each token; it returns the state after it. Changes `states` [slots,
    ...], after all rows were read."""
    before = states.copy()
    t = 0
    for row, q_len in enumerate(step.q_lens):
        state = before[step.slots_in[row]]
        for i in range(q_len):
            state = token(t, state)
            for slot in step.slots_after(row, i):
                states[slot] = state
            t += 1


def gated_delta(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    log_decay: NDArray,
    beta: NDArray,
    states: NDArray,
    layer: int,
    step: Step,
) -> tuple[Float64Array, Float64Array]:
    """See `api.GatedDelta`; padding tokens get an output of zero."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    states = np.array(states, np.float64)
    out = np.zeros(v.shape)
    group = v.shape[1] // k.shape[1]

    def scaled(x: Float64Array) -> Float64Array:
        return x / np.sqrt((x**2).sum() + 1e-6)

    def token(t: int, old: Float64Array) -> Float64Array:
        new = np.empty_like(old)
        for head in range(v.shape[1]):
            key, query = scaled(k[t, head // group]), scaled(q[t, head // group])
            s = np.exp(log_decay[t, head])[:, None] * old[head]
            s = s + np.outer(key, beta[t, head] * (v[t, head] - s.T @ key))
            out[t, head] = s.T @ query / np.sqrt(q.shape[2])
            new[head] = s
        return new

    run_tokens(step, states[layer], token)
    return out, states


def causal_conv(
    u: NDArray, weight: NDArray, states: NDArray, layer: int, step: Step
) -> tuple[Float64Array, Float64Array]:
    """See `api.CausalConv`, of states [layers, slots, K - 1, channels]; padding gets zeros."""
    u, weight = np.asarray(u, np.float64), np.asarray(weight, np.float64)
    states = np.array(states, np.float64)
    out = np.zeros(u.shape)

    def token(t: int, old: Float64Array) -> Float64Array:
        window = np.concatenate([old, u[t : t + 1]])
        total = (window * weight).sum(axis=0)
        out[t] = total / (1 + np.exp(-total))
        return window[1:]

    run_tokens(step, states[layer], token)
    return out, states
