"""Advice on changes, derived from an estimate."""

from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.models.config import ModelConfig
from sgl_jax.planner.estimate import Estimate
from sgl_jax.planner.memory import in_gib, plan_memory, smallest_fit

_MAX_WASTE = 0.1  # share of a request's pages
_MAX_COLLECTIVES = 0.3  # share of a decode step
_SMALLEST_PAGE = 16  # a tile of bfloat16


def advise(plan: Estimate) -> list[str]:
    """Return sentences of advice, the most useful first; none if nothing stands out."""
    args, config, workload = plan.request.args, plan.request.config, plan.request.workload
    found = []
    if (host_bytes := plan.memory.host_bytes) > plan.request.topology.host_memory_bytes:
        found.append(
            f"prefixes take {in_gib(host_bytes)} of a host's memory, which is "
            f"{in_gib(plan.request.topology.host_memory_bytes)}: the engine would not start; a "
            "smaller --hicache-ratio or --hicache-size"
        )
    if unused := plan.request.topology.num_devices - args.num_devices:
        found.append(f"{unused} devices of the slice are idle: raise --dp-size or --tp-size")
    if args.tp_size > config.num_kv_heads:
        found.append(
            f"--tp-size {args.tp_size} is more than the model's {_kept(config)} "
            "kept more than once; more --dp-size and less --tp-size keeps more"
        )
    page_size = plan.memory.page_size
    waste = page_size / 2 / workload.tokens
    if waste > _MAX_WASTE and page_size > _SMALLEST_PAGE:
        found.append(
            f"half a page of each request is unused, {waste:.0%} of its KV: a smaller --page-size"
        )
    share = plan.decode.time.exposed_s / plan.decode.time.total_s
    if share > _MAX_COLLECTIVES:
        found.append(
            f"collectives take {share:.0%} of a decode step: less --tp-size, more --dp-size"
        )
    rows = plan.decode.rows
    wanted = EngineConfig.resolve(args, config, "tpu").buckets.rows
    if plan.concurrency < wanted:
        found.append(
            f"memory holds {plan.concurrency} requests of this load on a rank, {wanted} may run: "
            f"{_more_room(plan)}, or a larger --mem-fraction-static"
        )
    elif plan.decode.time.bound == "HBM" and plan.memory.num_requests > 2 * rows:
        found.append(
            f"memory has room for {plan.memory.num_requests} requests of this load on a rank: a "
            "larger --max-running-requests reads the weights for more of them at once"
        )
    smaller = smallest_fit(plan.request)
    if smaller and smaller.topology.num_devices < plan.request.topology.num_devices:
        found.append(
            f"fits on fewer chips: {smaller.topology.name} with --dp-size "
            f"{smaller.args.dp_size} --tp-size {smaller.args.tp_size} holds "
            f"{plan_memory(smaller).kv_tokens:,} KV tokens a rank"
        )
    return found


def _kept(config: ModelConfig) -> str:
    if config.latent is not None:
        return "one latent a token, which is"
    return f"{config.num_kv_heads} KV heads: each head's KV is"


def _more_room(plan: Estimate) -> str:
    """Return advice for more KV tokens on a rank: more devices, if heads can still be split."""
    args, topology = plan.request.args, plan.request.topology
    has_devices = args.dp_size > 1 or args.num_devices < topology.num_devices
    if has_devices and args.tp_size < plan.request.config.num_kv_heads:
        return "more --tp-size"
    return "a larger slice"
