"""State space models in float64 numpy, token by token: the judge.

It shares no code with the implementations, and takes a step as the engine plans it, without chunks.
"""

import numpy as np
from numpy.typing import NDArray

from tests.kernels.gated_delta.reference import Float64Array, Step, run_tokens


def state_space(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    log_decay: NDArray,
    beta: NDArray,
    states: NDArray,
    layer: int,
    step: Step,
) -> tuple[Float64Array, Float64Array]:
    """See `api.StateSpace`; padding tokens get an output of zero."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    states = np.array(states, np.float64)
    out = np.zeros(v.shape)
    heads, groups = log_decay.shape[1], k.shape[1]
    size = v.shape[1] * v.shape[2] // heads  # of a head
    each = v.shape[2] // size  # heads of a line

    def token(t: int, old: Float64Array) -> Float64Array:
        new = np.empty_like(old)
        for head in range(heads):
            line, own = head // each, slice(head % each * size, (head % each + 1) * size)
            group = head // (heads // groups)
            change = np.outer(k[t, group], beta[t, head] * v[t, line, own])
            new[line, :, own] = np.exp(log_decay[t, head, 0]) * old[line, :, own] + change
            out[t, line, own] = new[line, :, own].T @ q[t, group]
        return new

    run_tokens(step, states[layer], token)
    return out, states
