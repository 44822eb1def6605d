"""A device's memory by use, before compilation: weights, tables, KV pages, states."""

from dataclasses import dataclass, replace

from sgl_jax.executor.engine_config import EngineConfig
from sgl_jax.executor.pool_size import pages_that_fit
from sgl_jax.models.placement import bytes_per_device, place_model
from sgl_jax.planner.arguments import PlanRequest, on_mesh
from sgl_jax.planner.topology import GIB, Topology, topology_mesh


@dataclass(frozen=True)
class MemoryPlan:
    """One device's memory; sizes in bytes."""

    usable_hbm_bytes: int
    weight_bytes: int
    table_bytes: int  # token table, lengths, sampling parameters
    reserved_bytes: int  # outside --mem-fraction-static, plus a step's logits
    kv_bytes: int
    kv_token_bytes: int  # per token, in all layers on this device
    state_bytes: int  # all slots of recurrent layers
    # Per pool of a rank, without null pages; the first is 0 or less if nothing fits. With recurrent
    # layers, the last is the number of snapshot slots.
    pool_pages: tuple[int, ...]
    page_size: int
    kv_tokens: int  # longest request on an otherwise empty rank
    num_requests: int  # requests of the load that fit in a rank's pages at once
    host_bytes: int  # blocks in each host's memory
    host_tokens: int  # longest prefix in a rank's otherwise empty blocks

    @property
    def num_pages(self) -> int:
        """Return the pages of a rank's first pool, which decides admission."""
        return self.pool_pages[0]

    @property
    def fits(self) -> bool:
        """Return True if weights, tables, KV and states fit; temporaries are not counted."""
        needed = self.weight_bytes + self.table_bytes + self.kv_bytes + self.state_bytes
        return needed <= self.usable_hbm_bytes


def plan_memory(request: PlanRequest) -> MemoryPlan:
    """Divide a device's memory as the engine does at its start. Raises ValueError if the model
    cannot be split that way, or `--swa-full-tokens-ratio` leaves windows too few pages."""
    args, chip = request.args, request.topology.chip
    mesh = topology_mesh(request.topology, args.dp_size, args.tp_size)
    config = EngineConfig.resolve(args, request.config, "tpu")
    page_size, pools = config.args.page_size, config.pools
    placed = place_model(request.config, mesh, config.build_options)
    state, row_params = config.state_shapes(tuple(num + 1 for num in pools.pages(0)), mesh)
    weights = bytes_per_device(placed.params)
    tables = bytes_per_device((state.token_table, state.row_lens, row_params))
    usable = int(chip.usable_hbm_bytes * args.mem_fraction_static)
    if args.max_total_tokens is not None:
        pages = args.max_total_tokens // page_size * pools.num_tables[0]
        # Take all requested pages: the compiler decides if they fit.
        if weights + tables >= chip.usable_hbm_bytes:
            pages = 0
    else:
        free = usable - weights - tables
        pages = pages_that_fit(free, pools, args.tp_size, config.work_bytes)
    pool_pages = pools.pages(max(0, pages))
    if pages > 0:
        pools.require_a_row(pool_pages)
    sizes = config.sizes(tuple(num + 1 for num in pool_pages))
    slot_bytes = config.state_layout.slot_bytes if config.state_layout else 0
    state_bytes = sizes.num_state_slots * slot_bytes
    num_requests = max(0, pages) // sizes.request_pages(request.workload.tokens)
    if len(pool_pages) > 1:  # limited by windows or states
        num_requests = min(num_requests, sizes.num_rows - 1)
    host = sizes.host_blocks if pages > 0 else ()
    paged = [group for group in config.groups if not group.is_recurrent]
    token_bytes = sum(pools.layouts[group.pool].page_bytes for group in paged) // page_size
    return MemoryPlan(
        usable_hbm_bytes=chip.usable_hbm_bytes,
        weight_bytes=weights,
        table_bytes=tables,
        reserved_bytes=chip.usable_hbm_bytes - usable + config.work_bytes,
        kv_bytes=(pools.num_bytes(max(0, pages)) - state_bytes) // args.tp_size,
        kv_token_bytes=token_bytes // args.tp_size,
        state_bytes=state_bytes // args.tp_size,
        pool_pages=(pages, *pool_pages[1:]),
        page_size=page_size,
        kv_tokens=sizes.tokens_within(max(0, pages)),
        num_requests=num_requests,
        host_bytes=config.host_bytes(sizes, request.topology.num_hosts) if host else 0,
        host_tokens=sizes.tokens_within(host[0] - 1) if host else 0,
    )


def requests_with_heads(request: PlanRequest, memory: MemoryPlan) -> int | None:
    """Return the concurrent requests in the same pages' bytes if each head's keys and values were
    cached instead of latents; None without latents."""
    own, config = request.config.latent, request.config
    if own is None:
        return None
    layout = EngineConfig.resolve(request.args, config, "tpu").pool_layouts[0]
    numbers = config.num_attention_layers * config.num_heads * (own.query_dim + own.value_dim)
    page_bytes = numbers * memory.page_size * layout.dtype.itemsize
    num_pages = memory.kv_bytes * request.args.tp_size // page_bytes
    return num_pages // -(-request.workload.tokens // memory.page_size)


def requests_without_windows(request: PlanRequest, memory: MemoryPlan) -> int | None:
    """Return the concurrent requests in the same pages' bytes if every layer kept every token; None
    without windows."""
    if all(spec.sliding_window is None for spec in request.config.layers):
        return None
    # The token bytes are those of all groups, of which each would keep the token.
    request_bytes = -(-request.workload.tokens // memory.page_size) * memory.page_size
    return memory.kv_bytes // (request_bytes * memory.kv_token_bytes)


def requests_without_sharing(request: PlanRequest) -> int | None:
    """Return the concurrent requests of a rank if no layer read another layer's cache; None if none
    does."""
    layers = request.config.layers
    if all(spec.cache_source is None for spec in layers):
        return None
    full = tuple(replace(spec, cache_source=None) for spec in layers)
    config = replace(request.config, layers=full)
    return plan_memory(replace(request, config=config)).num_requests


def smallest_fit(
    request: PlanRequest, same_slice: bool = False, lighter_than: int | None = None
) -> PlanRequest | None:
    """Return the smallest slice of the generation, with a mesh, that fits one whole request.

    Prefers the mesh with the most ranks. Weights, tables and pages are counted without compiling.
    `same_slice` considers only meshes of the requested slice, `lighter_than` only those with fewer
    bytes of weights per device.
    """
    own = request.topology
    for topology in [own] if same_slice else Topology.all_of(own.generation):
        for dp_size, tp_size in topology.meshes():
            candidate = on_mesh(request, topology, dp_size, tp_size)
            try:
                memory = plan_memory(candidate)
            except ValueError:  # the heads do not divide
                continue
            if lighter_than is not None and memory.weight_bytes >= lighter_than:
                continue
            if memory.fits and memory.kv_tokens >= request.workload.tokens:
                return candidate
    return None


def in_gib(num_bytes: int) -> str:
    """Return text such as "11.25 GiB"."""
    return f"{num_bytes / GIB:.2f} GiB"
