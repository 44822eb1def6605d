"""All meshes that use a whole slice, for comparison."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sgl_jax.core.settings import flag
from sgl_jax.planner.arguments import PlanRequest, on_mesh
from sgl_jax.planner.estimate import DoesNotFitError, Estimate, make_estimate
from sgl_jax.planner.plot_file import figure_class

Outcome = Estimate | str  # or the reason for the failure


class SweptMesh(NamedTuple):
    """A mesh, and the number of chips across which whole experts are distributed."""

    dp_size: int
    tp_size: int
    ep_size: int = 1

    def __str__(self) -> str:
        mesh = f"{self.dp_size} x {self.tp_size}"
        return mesh if self.ep_size == 1 else f"{mesh}, ep {self.ep_size}"


def sweep(request: PlanRequest) -> dict[SweptMesh, Outcome]:
    """Return the outcome by mesh, most ranks first, with each expert-parallel size if applicable.
    Each mesh that fits takes two compilations; progress is printed to stderr."""
    outcomes: dict[SweptMesh, Outcome] = {}
    for dp_size, tp_size in request.topology.meshes():
        has_experts = request.config.moe is not None
        for ep_size in sorted({1, tp_size, dp_size * tp_size}) if has_experts else [1]:
            mesh = SweptMesh(dp_size, tp_size, ep_size)
            print(f"planning dp x tp {mesh} ...", file=sys.stderr)
            try:
                outcomes[mesh] = make_estimate(_on_swept(request, mesh))
            except (DoesNotFitError, ValueError) as error:
                outcomes[mesh] = str(error)
    return outcomes


def _on_swept(request: PlanRequest, mesh: SweptMesh) -> PlanRequest:
    own = on_mesh(request, request.topology, mesh.dp_size, mesh.tp_size)
    return replace(own, args=replace(own.args, ep_size=mesh.ep_size))


def sweep_table(outcomes: dict[SweptMesh, Outcome]) -> str:
    """Return one line for each mesh, and the fastest."""
    width = max(9, *(len(str(mesh)) for mesh in outcomes))
    lines = [
        f"{'dp x tp':>{width}} {'KV tokens':>12} {'at once':>8} {'decode':>10} {'bound':>12} "
        f"{'prefill':>10} {'tokens/s':>10} {'per chip':>9}"
    ]
    for mesh, outcome in outcomes.items():
        if isinstance(outcome, str):
            lines.append(f"{mesh!s:>{width}} {outcome}")
            continue
        decode, prefill = outcome.decode.time, outcome.prefill.time
        lines.append(
            f"{mesh!s:>{width}} {mesh.dp_size * outcome.memory.kv_tokens:12,} "
            f"{mesh.dp_size * outcome.concurrency:8,} {decode.total_s * 1e3:7.2f} ms "
            f"{decode.bound:>12} {prefill.total_s * 1e3:7.2f} ms "
            f"{outcome.output_tokens_per_s:10,.0f} {outcome.output_tokens_per_s_per_chip:9,.0f}"
        )
    speeds = {
        mesh: own.output_tokens_per_s for mesh, own in outcomes.items() if isinstance(own, Estimate)
    }
    if len(speeds) > 1:
        best = max(speeds, key=lambda mesh: speeds[mesh])
        flags = [f"{flag(name)} {size}" for name, size in best._asdict().items()]
        lines.append(f"Fastest: {' '.join(flags)}")
    return "\n".join(lines)


def plot_sweep(outcomes: dict[SweptMesh, Outcome], path: Path) -> None:
    """Plot tokens per second and KV tokens of each mesh that fits. Raises RuntimeError without
    matplotlib, ValueError if no mesh fits."""
    plans = {mesh: outcome for mesh, outcome in outcomes.items() if isinstance(outcome, Estimate)}
    if not plans:
        raise ValueError("nothing to plot: no mesh fits")
    names = list(map(str, plans))
    figure = figure_class()(figsize=(8, 3.2), layout="constrained")
    speed, room = figure.subplots(1, 2)
    speed.bar(names, [plan.output_tokens_per_s for plan in plans.values()])
    speed.set_title("output tokens per second (estimate)")
    room.bar(names, [mesh[0] * plan.memory.kv_tokens for mesh, plan in plans.items()])
    room.set_title("KV tokens of all ranks")
    for axes in (speed, room):
        axes.set_xlabel("dp x tp")
    figure.savefig(path)
