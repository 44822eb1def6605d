"""The planner's command: read, plan, print."""

import dataclasses
import json
import sys
from collections.abc import Sequence

import jax

from sgl_jax.aot.topology import has_tpu_compiler
from sgl_jax.plan.advice import advise
from sgl_jax.plan.arguments import PlanRequest, parse_plan_request
from sgl_jax.plan.estimate import DoesNotFitError, Plan, make_plan
from sgl_jax.plan.memory import smallest_fit
from sgl_jax.plan.report import as_dict, as_text
from sgl_jax.plan.sweep import plot_sweep, require_plots, sweep, sweep_table


def main(argv: Sequence[str] | None = None) -> int:
    """Plan; returns the exit code: 0, 1 if the model does not fit, 2 for bad input."""
    request = parse_plan_request(argv)
    # Nothing runs, and a TPU that is here may be busy.
    jax.config.update("jax_platforms", "cpu")
    try:
        if not has_tpu_compiler():
            raise RuntimeError(
                "the TPU's compiler is not installed: pip install 'sgl-jax[tpu]' brings libtpu, "
                "which needs no TPU"
            )
        return _sweep(request) if request.sweep else _plan(request)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _plan(request: PlanRequest) -> int:
    try:
        plan = make_plan(request)
    except DoesNotFitError as error:
        nearest = _nearest(request)
        if request.json:
            print(json.dumps({"fits": False, "reason": str(error), "nearest": nearest}, indent=2))
        else:
            print(f"Does not fit: {error}.\nNearest that does: {nearest or 'none'}.")
        return 1
    plan = dataclasses.replace(plan, advice=advise(plan))
    if request.json:
        print(json.dumps({"fits": True, **as_dict(plan)}, indent=2))
    else:
        print(as_text(plan))
    return 0


def _sweep(request: PlanRequest) -> int:
    if request.plot:
        require_plots()
    outcomes = sweep(request)
    if request.json:
        rows = [
            {"dp_size": dp, "tp_size": tp}
            | (
                {"fits": True, **as_dict(outcome)}
                if isinstance(outcome, Plan)
                else {"fits": False, "reason": outcome}
            )
            for (dp, tp), outcome in outcomes.items()
        ]
        print(json.dumps(rows, indent=2))
    else:
        print(sweep_table(outcomes))
    if request.plot:
        plot_sweep(outcomes, request.plot)
    return 0 if any(isinstance(outcome, Plan) for outcome in outcomes.values()) else 1


def _nearest(request: PlanRequest) -> str | None:
    """Another mesh of the slice, or the smallest slice, that holds one request of the load."""
    # A limit on tokens that is too low is not what another slice mends.
    request = dataclasses.replace(
        request, args=dataclasses.replace(request.args, max_total_tokens=None)
    )
    found = smallest_fit(request, same_slice=True) or smallest_fit(request)
    if found is None:
        return None
    return (
        f"{found.topology.name} with --dp-size {found.args.dp_size} --tp-size {found.args.tp_size}"
    )
