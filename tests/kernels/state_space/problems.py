"""Ragged steps for state space models, drawn as those for gated delta nets are."""

from typing import NamedTuple

import numpy as np

from sgl_jax.kernels.gated_delta.batch import DeltaInputs
from tests.kernels.gated_delta.problems import LAYER, Case, Problem, build
from tests.kernels.state_space import reference


class Lines(NamedTuple):
    """A step in which each value head of a gated delta net is a line of `heads_each` heads."""

    tokens: DeltaInputs
    problem: Problem

    @classmethod
    def of(cls, case: Case, heads_each: int) -> "Lines":
        problem, rng = build(case), np.random.default_rng(case.seed)
        shape = (case.program.tokens, case.program.value_heads * heads_each)
        # Some heads forget all at once, some nothing.
        decay = -rng.exponential(size=shape) * rng.choice([0, 0.01, 1, 100], size=shape[1])
        steps = rng.uniform(0.01, 1.5, size=shape).astype(np.float32)
        q, k = (np.asarray(x / 4, case.program.dtype) for x in (problem.q, problem.k))
        tokens = DeltaInputs(q, k, problem.v, decay.astype(np.float32)[..., None], steps)
        return cls(tokens, problem)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (out, states) by the reference."""
        return reference.state_space(*self.tokens, self.problem.states, LAYER, self.problem.step)
