"""Developers' measurements and tools, outside the package. Run them from the repository root.

- `python -m benchmarks.host`: processor time of scheduling and memory, without a device
- `python -m benchmarks.host.loading`: memory and time of loading, as stored and quantized
- `python -m benchmarks.device`: the engine loop against the bare jitted step; compile gaps, and
  two engines in turn
- `python -m benchmarks.kernels.cost`: the TPU compiler's schedules of the kernels
- `python -m benchmarks.serving.over_bare`: the whole server against the bare compiled programs
- `python -m benchmarks.serving.two_servers`: two sets of flags, or two checkouts, in turn
- `python -m benchmarks.serving.session_turns`: turns of sessions on a running server
- `python -m benchmarks.trace`: recorded prompts with sliding windows or recurrent layers; fairness
- `python -m benchmarks.demo_model.train`: the demonstration model, its tasks and its evaluation

The package never imports this one.
"""

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[1] / "models" / "demo"
