"""Find the TPU slices with room for a model, without a TPU.

It needs the extra `tpu` on Linux (x86-64). It counts memory only, so it compiles nothing;
`sgl-jax plan` also compiles the steps and estimates their times. It prints:

    slice    devices  weights   KV pages  tokens of a rank
    v5e-16        16   8.37 GiB   4.72 GiB  123,520
    v6e-4          4  32.86 GiB   0.01 GiB  does not fit
    v6e-8          8  16.43 GiB   9.84 GiB  257,792
    v5p-8          4  32.86 GiB  48.22 GiB  631,936
    tpu7x-8        8  16.43 GiB  63.81 GiB  1,672,704
"""

import sys

from sgl_jax.planner.arguments import parse_plan_request
from sgl_jax.planner.memory import in_gib, plan_memory

SLICES = {"v5e-16": 16, "v6e-4": 4, "v6e-8": 8, "v5p-8": 4, "tpu7x-8": 8}


def main(model: str = "llama-3.3-70b") -> None:
    print("slice    devices  weights   KV pages  tokens of a rank")
    for name, devices in SLICES.items():
        flags = ["--model-path", model, "--topology", name, "--tp-size", str(devices)]
        memory = plan_memory(parse_plan_request(flags))
        weights, pages = in_gib(memory.weight_bytes), in_gib(memory.kv_bytes)
        room = f"{memory.kv_tokens:,}" if memory.fits else "does not fit"
        print(f"{name:8} {devices:7}  {weights:>9}  {pages:>9}  {room}")


if __name__ == "__main__":
    main(*sys.argv[1:])
