"""Find the scales of an 8-bit KV cache: `python -m benchmarks.calibrate_kv_scales`.

    python -m benchmarks.calibrate_kv_scales --model-path DIR --output FILE [--prompts TEXTS]

Serves prompts one after the other with an unquantised cache, and reads after each the greatest |K|
and |V| of each layer and KV head in the pool. The file is for a server with
`--kv-cache-dtype fp8_e4m3 --kv-cache-scales FILE`. Use prompts like the expected traffic; the
default prompts, from the demonstration tasks (split "valid"), suit the demonstration model.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.demo_model.tasks import held_out_questions
from benchmarks.host.steps import StepLoop
from sgl_jax.checkpoint.kv_scales import ScalesByHead, write_kv_scales
from sgl_jax.core.command_line import add_arguments
from sgl_jax.core.messages import GenerateRequest
from sgl_jax.core.sampling_params import SamplingParams
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.core.step_plan import Float32Array
from sgl_jax.executor.device_defaults import TPU_PAGE_SIZE
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.executor.model_settings import check_kv_scales
from sgl_jax.mem_cache import device_pool
from sgl_jax.models.config import ModelConfig
from sgl_jax.scheduler.scheduler import Scheduler
from sgl_jax.text.tokenizer import Tokenizer

SERVER_SETTINGS = (
    *("model_path", "tokenizer_path", "load_format", "dtype", "context_length", "device"),
    *("tp_size", "weight_sharding", "attention_backend", "page_size", "chunked_prefill_size"),
    "compilation_cache_dir",
)


def kv_absmax(
    args: ServerArgs, prompts: Sequence[list[int]], output_len: int
) -> tuple[Float32Array, Float32Array]:
    """Return the greatest |K| and |V| over prompts and answers, [layers, kv_heads] each."""
    config = ModelConfig.from_path(args.model_path)
    longest = max(map(len, prompts)) + output_len
    page_size = args.page_size or TPU_PAGE_SIZE  # the larger default, on TPU
    context_len = -(-longest // page_size) * page_size
    args = dataclasses.replace(
        args,
        # Room for one request, so that no other writes to the pool.
        context_length=min(context_len, config.max_position_embeddings),
        max_total_tokens=context_len,
        max_running_requests=1,
        warmup="none",
    )
    executor = ModelExecutor(args)
    scheduler = Scheduler(executor.sizes, args)
    loop = StepLoop(scheduler, executor)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=output_len)
    seen: list[Float32Array] = []
    for number, prompt in enumerate(prompts):
        scheduler.handle(GenerateRequest(rid=str(number), input_ids=prompt, sampling=sampling))
        while not scheduler.is_idle:
            loop.turn()
        seen.append(pool_absmax(executor))
    executor.close()
    if not np.isfinite(seen).all():
        raise RuntimeError("K and V are not finite")
    greatest = np.max(seen, axis=0).reshape(2, config.num_layers, config.num_kv_heads, -1)
    k, v = greatest.max(axis=3)  # over copies of a head
    return k, v


def pool_absmax(executor: ModelExecutor) -> Float32Array:
    """Return the maximum |K| and |V| in the pools, [2, layers, kv_heads], with replicated heads.

    Includes past tokens that have not been overwritten. Layers that share a pool's layer share its
    value. Not for 8-bit pools.
    """
    of_pools = [
        np.asarray(device_pool.kv_absmax(pool, layout, executor.mesh))
        for pool, layout in zip(executor._state.kv_pools, executor._pool_layouts, strict=True)
    ]
    groups = executor.sizes.groups
    num_layers = 1 + max(layer for group in groups for layer in group.layers)
    greatest = np.zeros((2, num_layers, of_pools[0].shape[2]), np.float32)
    for group in groups:
        if not group.is_recurrent:
            greatest[:, group.layers] = of_pools[group.pool]
    return greatest


def read_prompts(options: argparse.Namespace, args: ServerArgs) -> list[list[int]]:
    """Return the prompts' token ids, cut to leave room for an answer."""
    tokenizer = Tokenizer.load(args.tokenizer_path or args.model_path)
    if options.prompts is not None:
        lines = options.prompts.read_text().splitlines()
        prompts = [tokenizer.encode(line) for line in lines if line.strip()]
    else:
        questions = held_out_questions(options.num_prompts, split="valid")
        prompts = [tokenizer.apply_chat_template(question.messages) for question in questions]
    if not prompts:
        raise ValueError(f"no prompts in {str(options.prompts)!r}")
    limit = args.context_length or ModelConfig.from_path(args.model_path).max_position_embeddings
    if options.output_len >= limit:
        raise ValueError(
            f"--output-len must be less than the context of {limit} tokens, got "
            f"{options.output_len}"
        )
    return [prompt[: limit - options.output_len] for prompt in prompts]


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrate and write the file; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="calibrate_kv_scales", description="Find the scales of an 8-bit KV cache."
    )
    add_arguments(parser, only=SERVER_SETTINGS)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--prompts", type=Path, help="text file, a prompt a line")
    parser.add_argument("--num-prompts", type=int, default=60, help="of the default ones (60)")
    parser.add_argument("--output-len", type=int, default=16, help="tokens of an answer (16)")
    parser.add_argument(
        "--margin", type=float, default=2.0, help="times what was seen must fit (2.0)"
    )
    options = parser.parse_args(argv)
    try:
        if options.num_prompts < 1 or options.output_len < 1:
            raise ValueError("--num-prompts and --output-len must be at least 1")
        if not 1 <= options.margin <= 448:
            raise ValueError(f"--margin must be between 1 and 448, got {options.margin}")
        args = ServerArgs(**{name: getattr(options, name) for name in SERVER_SETTINGS})
        config = ModelConfig.from_path(args.model_path)
        if config.latent is not None:
            raise ValueError("scales of an 8-bit KV cache are of heads, and latents have none")
        check_kv_scales(config)
        prompts = read_prompts(options, args)
        k, v = kv_absmax(args, prompts, options.output_len)
        scales = ScalesByHead.fitting(k, v, options.margin)
        write_kv_scales(options.output, scales, config)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(prompts)} prompts of {sum(map(len, prompts)):,} tokens")
    for name, greatest, scale in (("K", k, scales.k), ("V", v, scales.v)):
        print(
            f"|{name}| of a head at most {greatest.min():.3g} to {greatest.max():.3g}, "
            f"scales {scale.min():.3g} to {scale.max():.3g}"
        )
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
