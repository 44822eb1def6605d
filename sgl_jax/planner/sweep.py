"""All meshes that use a whole slice, side by side."""

import sys
from pathlib import Path

from sgl_jax.planner.arguments import PlanRequest, on_mesh
from sgl_jax.planner.estimate import DoesNotFitError, Estimate, make_estimate
from sgl_jax.planner.plot_file import figure_class

Outcome = Estimate | str  # or the reason for none


def sweep(request: PlanRequest) -> dict[tuple[int, int], Outcome]:
    """By (dp_size, tp_size), the most ranks first; each takes two compilations, named on stderr."""
    outcomes: dict[tuple[int, int], Outcome] = {}
    for dp_size, tp_size in request.topology.meshes():
        print(f"planning dp {dp_size} x tp {tp_size} ...", file=sys.stderr)
        try:
            plan = make_estimate(on_mesh(request, request.topology, dp_size, tp_size))
            outcomes[dp_size, tp_size] = plan
        except (DoesNotFitError, ValueError) as error:
            outcomes[dp_size, tp_size] = str(error)
    return outcomes


def sweep_table(outcomes: dict[tuple[int, int], Outcome]) -> str:
    """One line for each mesh."""
    lines = [
        f"{'dp x tp':>9} {'KV tokens':>12} {'at once':>8} {'decode':>10} {'bound':>12} "
        f"{'prefill':>10} {'tokens/s':>10} {'per chip':>9}"
    ]
    for (dp_size, tp_size), outcome in outcomes.items():
        mesh = f"{dp_size} x {tp_size}"
        if isinstance(outcome, str):
            lines.append(f"{mesh:>9} {outcome}")
            continue
        decode, prefill = outcome.decode.time, outcome.prefill.time
        lines.append(
            f"{mesh:>9} {dp_size * outcome.memory.kv_tokens:12,} "
            f"{dp_size * outcome.concurrency:8,} {decode.total_s * 1e3:7.2f} ms "
            f"{decode.bound:>12} {prefill.total_s * 1e3:7.2f} ms "
            f"{outcome.output_tokens_per_s:10,.0f} {outcome.output_tokens_per_s_per_chip:9,.0f}"
        )
    return "\n".join(lines)


def plot_sweep(outcomes: dict[tuple[int, int], Outcome], path: Path) -> None:
    """Tokens per second and KV tokens of each mesh that fits.

    Raises RuntimeError without matplotlib, ValueError if no mesh fits.
    """
    plans = {mesh: outcome for mesh, outcome in outcomes.items() if isinstance(outcome, Estimate)}
    if not plans:
        raise ValueError("nothing to plot: no mesh fits")
    names = [f"{dp_size} x {tp_size}" for dp_size, tp_size in plans]
    figure = figure_class()(figsize=(8, 3.2), layout="constrained")
    speed, room = figure.subplots(1, 2)
    speed.bar(names, [plan.output_tokens_per_s for plan in plans.values()])
    speed.set_title("output tokens per second (estimate)")
    room.bar(names, [mesh[0] * plan.memory.kv_tokens for mesh, plan in plans.items()])
    room.set_title("KV tokens of all ranks")
    for axes in (speed, room):
        axes.set_xlabel("dp x tp")
    figure.savefig(path)
