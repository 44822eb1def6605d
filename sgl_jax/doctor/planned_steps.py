"""The planner's estimates for the machine, computed by another process: it compiles for minutes."""

import json
import os
import subprocess
import sys

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.settings import flag
from sgl_jax.planner.arguments import SERVER_SETTINGS
from sgl_jax.planner.topology import Topology, generation_of

_MAX_TEXT = 300


def slice_of(device_kind: str, num_devices: int) -> Topology | None:
    """Return the smallest slice with so many devices of a kind; None if it is unknown."""
    generation = generation_of(device_kind)
    slices = [] if generation is None else Topology.all_of(generation)
    return next((own for own in slices if own.num_devices >= num_devices), None)


class PlannedSteps:
    """A planner at work. Uses no device: a TPU that this process holds is not touched.

    Attributes:
        problem: why there is no estimate, after `wait`; empty if there is one.
    """

    def __init__(
        self, args: ServerArgs, topology: Topology, input_len: int, output_len: int
    ) -> None:
        defaults = ServerArgs(model_path=args.model_path)
        words = ["--model-path", args.model_path, "--topology", topology.name]
        words += ["--input-len", str(input_len), "--output-len", str(output_len), "--json"]
        for name in SERVER_SETTINGS:
            value = getattr(args, name)
            if value != getattr(defaults, name):
                words += [flag(name)] if value is True else [flag(name), str(value)]
        self.problem = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sgl_jax.planner", *words],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> dict[str, float]:
        """Return the seconds of "decode" and "prefill" steps; empty if the planner failed."""
        out, errors = self._process.communicate()
        if self._process.returncode != 0:
            self.problem = " ".join((errors or out).split())[-_MAX_TEXT:]
            return {}
        plan = json.loads(out)
        return {kind: plan[kind]["time"]["total_s"] for kind in ("decode", "prefill")}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
