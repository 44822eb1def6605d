"""Several decode steps in one program: a loop on the device around the step.

No row of such a plan prefills, drafts or has a grammar, so a step needs only what the previous step
left on the device. A row ends at a stop token, after the steps that the plan gives it, or at a
result that is not finite. From then on it has no token, like padding, and writes nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sgl_jax.core.step_plan import NON_FINITE
from sgl_jax.executor.layout import StepOutput, pack_logprobs
from sgl_jax.executor.step import RankStep, StepState, run_step
from sgl_jax.layers.mesh_axes import any_over_data
from sgl_jax.layers.sampling.logprobs import no_logprobs
from sgl_jax.layers.sampling.row_params import RowParams, unpack_row_params
from sgl_jax.models.decoder import CausalLM


class _Carry(NamedTuple):
    """The loop's variables."""

    step: jax.Array  # int32[] steps done
    is_running: jax.Array  # bool[B] rows with a token in the next step
    runs: jax.Array  # bool[], whether any row of any rank is running
    state: StepState
    tokens: jax.Array  # int32[B, most], as `StepOutput.tokens`
    logprobs: jax.Array  # int32[B, most, n]
    token_values: dict[str, jax.Array]  # [B, most, ...] each


def run_decode_steps(
    model: CausalLM, state: StepState, row_params: jax.Array, given: RankStep
) -> tuple[StepState, StepOutput]:
    """Run up to `max_decode_steps` steps of one rank; see `run_step`.

    Row i takes up to `num_steps[i]` steps. All ranks run as many steps as the longest row of any,
    since steps exchange values.
    """
    controls, most = given.controls, given.sizes.max_decode_steps
    params = unpack_row_params(row_params[controls.rows])
    starts = jnp.where(controls.relayed, state.row_lens[controls.rows] - 1, controls.kv_starts)
    last = state.token_table.at[controls.rows, starts].get(mode="clip")
    # A row that ended in the launch before writes the KV of its last token, as its lease says.
    num_steps = jnp.where(_stops(params, starts + 1, last), 1, controls.num_steps)
    is_running = controls.q_lens > 0

    def run_next(carry: _Carry) -> _Carry:
        step, is_running = carry.step, carry.is_running
        own = controls._replace(
            kv_starts=jnp.where(is_running, starts + step, 0),
            q_lens=is_running.astype(jnp.int32),
            samples=is_running,
            relayed=jnp.zeros_like(is_running),
        )
        state, output = run_step(model, carry.state, row_params, given._replace(controls=own))
        tokens = output.tokens[:, 0]
        token_values = {
            name: values.at[:, step].set(_of_rows(output.token_values[name], is_running))
            for name, values in carry.token_values.items()
        }
        is_running &= (tokens != NON_FINITE) & ~_stops(params, starts + step + 2, tokens)
        is_running &= step + 1 < num_steps
        return _Carry(
            step + 1,
            is_running,
            any_over_data(jnp.any(is_running)),
            state,
            carry.tokens.at[:, step].set(tokens),
            carry.logprobs.at[:, step].set(output.logprobs[:, 0]),
            token_values,
        )

    num_rows = controls.rows.shape[0]
    logprobs = pack_logprobs(no_logprobs(num_rows * most)).reshape(num_rows, most, -1)
    tokens = jnp.full((num_rows, most), -1, jnp.int32)
    runs = any_over_data(jnp.any(is_running))
    token_values = {
        name: jnp.zeros((num_rows, most, *one.shape), one.dtype)
        for name, one in model.token_values.items()
    }
    carry = _Carry(jnp.int32(0), is_running, runs, state, tokens, logprobs, token_values)
    carry = lax.while_loop(lambda carry: carry.runs, run_next, carry)
    is_wrong = jnp.any(carry.tokens == NON_FINITE, axis=1, keepdims=True)
    tokens = jnp.where(is_wrong, -1, carry.tokens)
    tokens = tokens.at[:, :1].set(jnp.where(is_wrong, NON_FINITE, tokens[:, :1]))
    no_scores = pack_logprobs(no_logprobs(1))
    return carry.state, StepOutput(tokens, carry.logprobs, no_scores, None, carry.token_values)


def _of_rows(queries: jax.Array, is_running: jax.Array) -> jax.Array:
    """Return [B, ...], the values of each row's query among those of the running rows."""
    place = jnp.cumsum(is_running) - 1
    return queries.at[place].get(mode="clip")


def _stops(params: RowParams, num_tokens: jax.Array, last: jax.Array) -> jax.Array:
    """Return bool[B]: True if `last`, the last of a row's `num_tokens` tokens, ends it."""
    is_stop = jnp.any(params.stop_ids == last[:, None], axis=1)
    return is_stop & (num_tokens > params.prompt_len + params.min_new_tokens)
