"""The chips of a rank share the rows of decode, also if they are not equally many for each chip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from sgl_jax.kernels.latent_attention.chosen import ChosenLatents
from sgl_jax.kernels.latent_attention.latents import IndexQueries, ReusedChoice
from sgl_jax.kernels.latent_attention.xla import latent_attention
from tests.kernels.attention.problems import LAYER, Case
from tests.kernels.latent_attention.problems import (
    SCALE,
    LatentProgram,
    build,
    expected,
    make_batch,
)

PROGRAM = LatentProgram(rows=5, index_heads=3, key_dim=8, top_k=13, max_drafts=2)
MIXED = Case(PROGRAM, [(100, 3), (17, 1), (30, 2), (5, 1)], [(90, 20)], 0, seed=3)


@pytest.mark.parametrize(
    ("chips", "case"),
    [
        (4, MIXED),
        *[
            pytest.param(chips, case, marks=pytest.mark.long)
            for chips, case in (
                (2, MIXED),
                (4, MIXED._replace(decodes=[(100, 1)], prefills=[(0, 9), (40, 30)])),
                (4, MIXED._replace(decodes=[])),
                (4, Case(PROGRAM._replace(rows=1), [(99, 1)], [], 0, seed=3)),
                (2, MIXED._replace(program=PROGRAM._replace(rows=7, page_size=1))),
            )
        ],
    ],
)
def test_chips_attend_for_their_rows_with_the_heads_of_all(monkeypatch, chips, case):
    """And so they do in a layer that reuses the choice. No row is read that does not exist."""
    problem, program = build(case), case.program
    read, latents = [], ChosenLatents._latents

    def latents_of(self, rows, places):
        jax.debug.callback(lambda own: read.extend(own.tolist()), rows)
        return latents(self, rows, places)

    monkeypatch.setattr(ChosenLatents, "_latents", latents_of)

    def attend(problem):
        batch = make_batch(problem, program)
        index = IndexQueries(*problem.index, program.top_k, "tensor", True)

        def attend_by(index, cache):
            parts = problem.queries, problem.latents, problem.up, cache
            return latent_attention(*parts, jnp.int32(LAYER), batch, SCALE, index)

        first, cache, chosen = attend_by(index, problem.kv_cache)
        second, *_ = attend_by(ReusedChoice(chosen, "tensor"), cache)
        return first, second

    whole, by_head = PartitionSpec(), PartitionSpec(None, "tensor")
    arrays = jax.tree.map(jnp.asarray, problem._replace(index=problem.index[:3]))
    specs = jax.tree.map(lambda _: whole, arrays)
    specs = specs._replace(
        queries=type(problem.queries)(by_head, by_head),
        up=type(problem.up)(PartitionSpec("tensor"), PartitionSpec("tensor")),
    )
    mesh = jax.make_mesh((chips,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:chips])
    run = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=by_head, check_vma=False)
    want, _ = expected(problem, program)
    num_tokens = problem.q_lens.sum()
    for found in jax.jit(run)(arrays):
        np.testing.assert_allclose(found[:num_tokens], want[:num_tokens], rtol=0, atol=2e-5)
    jax.effects_barrier()
    assert 0 <= min(read) <= max(read) < program.rows
