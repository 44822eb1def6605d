"""Times the compiled program of a step by itself."""

import time

import jax

from sgl_jax.core.page_tables import PageTables
from sgl_jax.core.step_plan import StepPlan
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.executor.plan_check import check_plan


def time_bare_steps(executor: ModelExecutor, plan: StepPlan, num_steps: int) -> float:
    """Return the seconds for `num_steps` back-to-back runs of one plan's program.

    It overwrites KV and tokens of the plan's rows and pages, so nothing may be running.
    """
    check_plan(plan, executor.sizes)
    bucket = executor._stages.bucket_of(plan)
    tables = PageTables(executor.sizes)
    tables.apply(plan.page_changes)
    step_input = jax.device_put(executor._layouts[bucket].pack(plan.ranks, tables))
    program = executor._programs.step(bucket)
    jax.block_until_ready(executor._state)
    start = time.perf_counter()
    for _ in range(num_steps):
        arguments = executor.weights.arrays, executor._state, executor._row_params
        executor._state, output = program(*arguments, *step_input)
    jax.block_until_ready(output)
    return time.perf_counter() - start
