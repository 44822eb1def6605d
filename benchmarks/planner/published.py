"""Published throughputs of other engines on TPUs, and the settings that they were measured with.

The sources:

    recipes   github.com/AI-Hypercomputer/tpu-recipes, inference/{trillium,ironwood}/vLLM
    cookbook  github.com/sgl-project/sglang-jax, docs/cookbook/autoregressive
    pull 3050 github.com/vllm-project/tpu-inference, pull request 3050
    blog      blog.vllm.ai, the new unified backend for TPU
"""

from typing import NamedTuple

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.served import served_config
from sgl_jax.planner.arguments import PlanRequest, Workload, read_config
from sgl_jax.planner.topology import Topology

_MEMORY_SHARE = 0.9  # unless a recipe has another
_PAGE = 128


class Published(NamedTuple):
    """One published figure; lengths are the means of the requests that were sent."""

    model: str
    topology: str
    input_len: int
    output_len: int
    clients: int
    output_tokens_per_s: float
    source: str
    tp: int
    chunk: int  # tokens of a step
    ep: int = 1
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    memory_share: float = _MEMORY_SHARE

    @property
    def name(self) -> str:
        """Return a name; figures are divided by its order."""
        load = f"{self.input_len}/{self.output_len} x{self.clients}"
        return f"{self.model} {self.topology} {load}"

    @property
    def request(self) -> PlanRequest:
        """Return what the planner is asked."""
        context = -(-(self.input_len + self.output_len) // _PAGE) * _PAGE
        args = ServerArgs(
            model_path=self.model,
            tp_size=self.tp,
            ep_size=self.ep,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            max_running_requests=self.clients,
            chunked_prefill_size=self.chunk,
            context_length=context,
            mem_fraction_static=self.memory_share,
        )
        config = served_config(read_config(self.model), args)
        load = Workload(self.input_len, self.output_len)
        return PlanRequest(args, config, Topology.parse(self.topology), load)


def _fp8_32b(input_len: int, output_len: int, rate: float) -> Published:
    return Published(
        *("qwen3-32b", "tpu7x-2", input_len, output_len, 320, rate, "recipes", 2, 4096),
        quantization="w8a8_fp8",
        kv_cache_dtype="fp8_e4m3",
    )


def _coder(input_len: int, output_len: int, rate: float) -> Published:
    model = "qwen3-coder-480b-a35b-fp8"
    return Published(
        *(model, "tpu7x-8", input_len, output_len, 64, rate, "recipes", 8, 8192, 8),
        kv_cache_dtype="fp8_e4m3",
    )


def _hybrid(input_len: int, output_len: int, clients: int, rate: float, source: str) -> Published:
    model = "qwen3.5-397b-a17b-fp8"
    return Published(
        *(model, "tpu7x-8", input_len, output_len, clients, rate, source, 8, 8192, 8),
        kv_cache_dtype="fp8_e4m3",
    )


PUBLISHED = (
    Published(
        "deepseek-v2-lite", "v6e-4", 512, 128, 8, 873.9, "cookbook", 4, 2048, 4, memory_share=0.88
    ),
    Published("llama-3.1-8b", "v6e-1", 1800, 128, 128, 11.6 * 128, "blog", 1, 1024),
    # Lengths up to 512, and up to 1,024 with 16 clients: 265 and 258, and 524 on average, by the
    # requests and tokens a second.
    Published(
        "llama-3.1-8b", "v6e-4", 265, 258, 16, 1448.9, "cookbook", 4, 2048, memory_share=0.88
    ),
    Published("llama-3.3-70b", "tpu7x-8", 1024, 1024, 128, 3609.7, "cookbook", 8, 2048),
    Published(
        "llama-3.3-70b", "v6e-16", 524, 524, 16, 882.2, "cookbook", 16, 2048, memory_share=0.85
    ),
    Published("llama-3.3-70b", "v6e-8", 1000, 1000, 64, 2494.8, "recipes", 8, 512),
    Published("llama-3.3-70b", "v6e-8", 1000, 1000, 128, 3544.5, "recipes", 8, 512),
    Published("qwen3-30b-a3b", "tpu7x-8", 1024, 1024, 128, 6179.5, "cookbook", 8, 2048, 8),
    Published("qwen3-30b-a3b", "v6e-16", 524, 524, 16, 1476.2, "cookbook", 16, 2048, 16),
    Published("qwen3-32b", "v6e-4", 524, 524, 16, 833.8, "cookbook", 4, 2048, memory_share=0.8),
    Published("qwen3-32b", "v6e-4", 1024, 1024, 64, 1977.5, "cookbook", 4, 2048, memory_share=0.8),
    Published("qwen3-32b", "v6e-4", 1024, 1024, 256, 2123.0, "cookbook", 4, 2048, memory_share=0.8),
    Published("qwen3-32b", "v6e-4", 4096, 1024, 64, 785.3, "cookbook", 4, 2048, memory_share=0.8),
    Published("qwen3-32b", "v6e-4", 8192, 1024, 64, 435.3, "cookbook", 4, 2048, memory_share=0.8),
    Published("qwen3-8b", "tpu7x-8", 1024, 1024, 128, 8521.5, "cookbook", 8, 2048),
    Published("qwen3-8b", "v6e-4", 1024, 1024, 64, 5296.6, "cookbook", 4, 2048, memory_share=0.8),
    Published("qwen3-8b", "v6e-4", 1024, 1024, 256, 7571.8, "cookbook", 4, 2048, memory_share=0.8),
    Published("qwen3-8b", "v6e-4", 4096, 1024, 64, 2528.8, "cookbook", 4, 2048, memory_share=0.8),
    Published("qwen3-8b", "v6e-4", 8192, 1024, 64, 1458.8, "cookbook", 4, 2048, memory_share=0.8),
    _fp8_32b(1024, 1024, 6556.7),
    _fp8_32b(1024, 8192, 3959.6),
    _fp8_32b(8192, 1024, 1382.2),
    _coder(1024, 1024, 1996.0),
    _coder(1024, 8192, 2075.5),
    _coder(8192, 1024, 1053.1),
    _hybrid(1024, 8192, 128, 5172.0, "recipes"),
    _hybrid(8192, 1024, 64, 1643.0, "pull 3050"),
    _hybrid(8192, 1024, 128, 2280.9, "recipes"),
    _hybrid(8192, 1024, 256, 3161.0, "pull 3050"),
)
