"""The model with the settings of an engine."""

from pathlib import Path

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.eagle3_config import with_eagle3_head


def served_config(config: ModelConfig, args: ServerArgs) -> ModelConfig:
    """Return `config` quantized at load, and with a draft layer, if `args` have them.

    Raises ModelConfigError if this is not possible.
    """
    config = config.quantized(args.quantization)
    if args.speculative_draft_model_path:
        return with_eagle3_head(config, Path(args.speculative_draft_model_path))
    return config.drafting() if args.has_draft_layer else config
