"""The planner's command line: settings that shape a step, the slice, and the load."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.core.command_line import add_arguments, check_numbers
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import ModelConfig, ModelConfigError
from sgl_jax.models.served import served_config
from sgl_jax.planner.plot_file import PLOT_SUFFIXES, check_plot_file
from sgl_jax.planner.topology import Topology

SERVER_SETTINGS = (
    *("model_path", "dtype", "quantization", "kv_cache_dtype", "context_length"),
    *("tp_size", "dp_size"),
    *("ep_size", "ep_num_redundant_experts", "init_expert_location"),
    *("weight_sharding", "hidden_sharding", "attention_backend"),
    *("page_size", "mem_fraction_static", "max_total_tokens", "swa_full_tokens_ratio"),
    *("enable_hierarchical_cache", "hicache_ratio", "hicache_size"),
    *("max_running_requests", "chunked_prefill_size"),
    *("enable_multimodal", "image_cache_size", "max_images_per_request"),
    *("speculative_algorithm", "speculative_num_draft_tokens", "speculative_draft_model_path"),
)
_MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Workload:
    """The load to plan for: as many equal requests at once as fit."""

    input_len: int
    output_len: int

    @property
    def tokens(self) -> int:
        """Return the KV tokens of one request at its end."""
        return self.input_len + self.output_len


@dataclass(frozen=True)
class PlanRequest:
    args: ServerArgs
    config: ModelConfig
    topology: Topology
    workload: Workload
    json: bool = False
    sweep: bool = False
    plot: Path | None = None
    host_link_gb_s: float | None = None  # per rank; None: the rate of its chips' links
    store_gb_s: float = 3.0


def known_models() -> list[str]:
    """Return the published models with a config in this package."""
    return sorted(file.stem for file in _MODELS.glob("*.json"))


def read_config(model_path: str) -> ModelConfig:
    """Return the config of a model folder, a config.json, a GGUF file, or a known model. Raises
    ValueError if there is none, or the model is not supported."""
    return ModelConfig.from_path(_config_path(model_path))


def read_served_config(args: ServerArgs) -> ModelConfig:
    """Return the config of `args.model_path` as a server with `args` uses it. Raises as
    `read_config`, and if the model cannot be served so."""
    path = _config_path(args.model_path)
    return served_config(ModelConfig.from_path(path), args, path)


def _config_path(model_path: str) -> Path:
    if model_path in known_models():
        return _MODELS / f"{model_path}.json"
    if not Path(model_path).exists():
        known = ", ".join(known_models())
        raise ModelConfigError(
            f"--model-path {model_path!r} is no folder, no file, and none of {known}"
        )
    return Path(model_folder(model_path))


def parse_plan_request(argv: Sequence[str] | None = None) -> PlanRequest:
    """Read the command line; invalid arguments exit with the usage."""
    parser = argparse.ArgumentParser(
        prog="sgl-jax plan",
        description="Compile a model's steps for a TPU slice, without one, and print memory and "
        "time. --model-path is a folder, a config.json, a GGUF file, or one of "
        f"{', '.join(known_models())}.",
    )
    add_arguments(parser, only=SERVER_SETTINGS)
    parser.add_argument("--topology", required=True, help="slice: v6e-8, v5e-4, v5p-8, v6e:2x4")
    parser.add_argument("--input-len", type=int, default=1024, help="tokens of a prompt (1024)")
    parser.add_argument("--output-len", type=int, default=1024, help="tokens of an answer (1024)")
    parser.add_argument(
        "--host-link-gb-s",
        type=float,
        help="with --enable-hierarchical-cache, gigabytes a second from host memory to each "
        "rank (by default for each of its chips 13 on v5e, 32 on v6e, 15 on v5p, 46 on tpu7x)",
    )
    parser.add_argument(
        "--store-gb-s",
        type=float,
        default=PlanRequest.store_gb_s,
        help="the same from the store to host memory (%(default)s: an NVMe disk on four "
        "lanes of PCIe 3)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="plan every dp x tp that uses the whole slice, instead of --dp-size and --tp-size",
    )
    parser.add_argument(
        "--plot", type=Path, help=f"with --sweep: file for a plot ({', '.join(PLOT_SUFFIXES)})"
    )
    words = parser.parse_args(argv)
    try:
        check_numbers(
            words, counts=("input_len", "output_len"), finite=("host_link_gb_s", "store_gb_s")
        )
        if words.plot is not None:  # fail now, not after minutes of compiling
            if not words.sweep:
                raise ValueError("--plot needs --sweep")
            check_plot_file(words.plot)
        topology = Topology.parse(words.topology)
        args = ServerArgs(**{name: getattr(words, name) for name in SERVER_SETTINGS})
        if not words.sweep:
            topology.check_mesh(args.dp_size, args.tp_size)
        config = read_served_config(args)
        workload = Workload(words.input_len, words.output_len)
        limit = args.context_length or config.max_position_embeddings
        if workload.tokens > limit:
            raise ValueError(
                f"--input-len + --output-len is {workload.tokens}, the context limit {limit}"
            )
    except ValueError as error:
        parser.error(str(error))
    shown = words.json, words.sweep, words.plot
    return PlanRequest(
        *(args, config, topology, workload), *shown, words.host_link_gb_s, words.store_gb_s
    )


def on_mesh(request: PlanRequest, topology: Topology, dp_size: int, tp_size: int) -> PlanRequest:
    """Return `request` for a different slice and mesh, with experts over the same mesh axes."""
    own = request.args
    ep_size, copies, location = own.ep_size, own.ep_num_redundant_experts, own.init_expert_location
    if ep_size > 1:
        ep_size = tp_size if ep_size == own.tp_size else dp_size * tp_size
    if ep_size == 1:
        copies, location = 0, "trivial"
    args = dataclasses.replace(
        own,
        dp_size=dp_size,
        tp_size=tp_size,
        ep_size=ep_size,
        ep_num_redundant_experts=copies,
        init_expert_location=location,
    )
    return dataclasses.replace(request, args=args, topology=topology)
