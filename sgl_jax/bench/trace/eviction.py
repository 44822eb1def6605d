"""How the radix tree may be told to evict: the one place that knows the policies by name."""

from sgl_jax.core.engine_sizes import EngineSizes
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.scheduler.config import SchedulerConfig

EVICTION_POLICIES = ("lru",)


def memory_with_policy(sizes: EngineSizes, policy: str) -> RankMemory:
    """One rank's memory whose tree evicts by `policy`."""
    return RankMemory(0, sizes)


def config_with_policy(config: SchedulerConfig, policy: str) -> SchedulerConfig:
    """`config` for ranks whose trees evict by `policy`."""
    return config
