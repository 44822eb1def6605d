"""The planner's command, `sgl-jax plan` or `python -m sgl_jax.planner`: read, plan, print."""

import dataclasses
import json
import sys
from collections.abc import Sequence

import jax

from sgl_jax.planner.arguments import PlanRequest, parse_plan_request
from sgl_jax.planner.estimate import DoesNotFitError, Estimate, StepDoesNotFitError, make_estimate
from sgl_jax.planner.memory import plan_memory, smallest_fit
from sgl_jax.planner.plot_file import figure_class
from sgl_jax.planner.report import as_dict, as_text
from sgl_jax.planner.sweep import plot_sweep, sweep, sweep_table


def main(argv: Sequence[str] | None = None) -> int:
    """Plan; return the exit code: 0, 1 if the model does not fit, 2 for bad input."""
    request = parse_plan_request(argv)
    # Nothing runs, and a local TPU may be busy.
    jax.config.update("jax_platforms", "cpu")
    try:
        return _sweep(request) if request.sweep else _plan(request)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _plan(request: PlanRequest) -> int:
    try:
        plan = make_estimate(request)
    except DoesNotFitError as error:
        nearest = _nearest(request, isinstance(error, StepDoesNotFitError))
        if request.json:
            print(json.dumps({"fits": False, "reason": str(error), "nearest": nearest}, indent=2))
        else:
            print(f"Does not fit: {str(error).rstrip('.')}.")
            print(f"Nearest that does: {nearest or 'none'}.")
        return 1
    if request.json:
        print(json.dumps({"fits": True, **as_dict(plan)}, indent=2))
    else:
        print(as_text(plan))
    return 0


def _sweep(request: PlanRequest) -> int:
    if request.plot:
        figure_class()  # fail now if missing, not after minutes of compiling
    outcomes = sweep(request)
    if request.json:
        rows = [
            mesh._asdict()
            | (
                {"fits": True, **as_dict(outcome)}
                if isinstance(outcome, Estimate)
                else {"fits": False, "reason": outcome}
            )
            for mesh, outcome in outcomes.items()
        ]
        print(json.dumps(rows, indent=2))
    else:
        print(sweep_table(outcomes))
    if not any(isinstance(outcome, Estimate) for outcome in outcomes.values()):
        return 1
    if request.plot:
        plot_sweep(outcomes, request.plot)
    return 0


def _nearest(request: PlanRequest, is_compiled: bool) -> str | None:
    """Return the limit, mesh or smallest slice that fits one request of the load. If `is_compiled`,
    the compiler rejects the request, although its bytes fit."""
    limit, args = request.args.max_total_tokens, request.args
    unlimited = dataclasses.replace(request, args=dataclasses.replace(args, max_total_tokens=None))
    asked = plan_memory(unlimited)
    need = -(-request.workload.tokens // asked.page_size) * asked.page_size
    lifted = ""
    if limit is not None:
        is_low = limit < need
        if asked.kv_tokens >= need and (is_low or limit > asked.kv_tokens):
            bound = f"at least {need}" if is_low else f"at most {asked.kv_tokens}"
            return f"{_mesh(request)}, without --max-total-tokens or with {bound}"
        if is_low:
            request, lifted = unlimited, f", without --max-total-tokens or with at least {need}"
    lighter_than = asked.weight_bytes if is_compiled else None
    found = smallest_fit(request, same_slice=True, lighter_than=lighter_than) or smallest_fit(
        request, lighter_than=lighter_than
    )
    return None if found is None else f"{_mesh(found)}{lifted}"


def _mesh(request: PlanRequest) -> str:
    args = request.args
    return f"{request.topology.name} with --dp-size {args.dp_size} --tp-size {args.tp_size}"


if __name__ == "__main__":
    sys.exit(main())
