"""Defaults of the settings that depend on the device."""

import dataclasses

from sgl_jax.core.server_args import ServerArgs

# With smaller pages, attention on a TPU is bound by instructions (docs/inside/kernels.md).
TPU_PAGE_SIZE = 128
_PAGE_SIZE = 16
_CPU_CHUNK_TOKENS = 512
_ACCELERATOR_CHUNK_TOKENS = 2048
_CPU_RUNNING_REQUESTS = 32
_ACCELERATOR_RUNNING_REQUESTS = 256


def resolve_for_device(args: ServerArgs, platform: str) -> ServerArgs:
    """Return `args` with a value for each setting that depends on the device."""
    on_cpu = platform == "cpu"
    backend = args.attention_backend
    if backend == "auto":
        backend = "pallas" if platform == "tpu" else "xla"
    if backend == "pallas" and platform == "gpu":
        raise ValueError(
            "--attention-backend pallas runs on a TPU and is simulated on a CPU; on a gpu "
            "choose xla"
        )
    # XLA on a CPU is about 30 times slower in bfloat16.
    dtype = ("float32" if on_cpu else "bfloat16") if args.dtype == "auto" else args.dtype
    return dataclasses.replace(
        args,
        device=platform,
        dtype=dtype,
        kv_cache_dtype=dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        warmup=_choose_warmup(args),
        attention_backend=backend,
        page_size=args.page_size or (TPU_PAGE_SIZE if platform == "tpu" else _PAGE_SIZE),
        max_running_requests=args.max_running_requests
        or (_CPU_RUNNING_REQUESTS if on_cpu else _ACCELERATOR_RUNNING_REQUESTS),
        chunked_prefill_size=args.chunked_prefill_size
        or (_CPU_CHUNK_TOKENS if on_cpu else _ACCELERATOR_CHUNK_TOKENS),
    )


def _choose_warmup(args: ServerArgs) -> str:
    """Return the resolved `--warmup`. Raises ValueError for `staged` on several hosts: all hosts
    launch the same programs, but compile them at different times."""
    if args.warmup == "auto":
        return "staged" if args.num_hosts == 1 else "plain"
    if args.warmup == "staged" and args.num_hosts > 1:
        raise ValueError(
            "--warmup staged is for one host; choose plain, all or none with --nnodes "
            f"{args.num_hosts}"
        )
    return args.warmup
