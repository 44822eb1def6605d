"""Seeds of choices are those that JAX folds in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.core.sampling_params import choice_seed

SEEDS = (0, 1, -1, -2, -3, 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63), 1234567890123456789)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_choice_has_the_seed_that_fold_in_makes(seed: int) -> None:
    words = np.array([seed], np.int64).view(np.uint32)[::-1]
    key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
    for choice in (1, 2, 127):
        folded = np.asarray(jax.random.key_data(jax.random.fold_in(key, choice)))
        assert choice_seed(seed, choice) == int(folded[::-1].copy().view(np.int64)[0])
    assert choice_seed(seed, 0) == seed


def test_no_two_choices_of_near_seeds_have_one_seed() -> None:
    seeds = [choice_seed(seed, choice) for seed in range(-64, 64) for choice in range(32)]
    assert len(set(seeds)) == len(seeds)
