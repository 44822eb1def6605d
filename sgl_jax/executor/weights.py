"""The weights on the devices, which can be replaced by those of another folder."""

import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from sgl_jax.checkpoint.loading import detect_format, load_params
from sgl_jax.checkpoint.stored_head import with_stored_head
from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.layers.mesh_axes import of_each_host
from sgl_jax.layers.parameter import ParamTree
from sgl_jax.models.config import ModelConfig
from sgl_jax.models.placement import PlacedModel
from sgl_jax.models.served import served_config

logger = logging.getLogger(__name__)


class WeightsError(ValueError):
    """The new weights could not be loaded; the engine keeps the old weights."""


class LoadFailure(NamedTuple):
    """The reason why weights could not be loaded."""

    reason: str
    lacks_room: bool  # on the devices


class ServedWeights:
    """The weights of a model; `arrays` are its parameters in the order of `jax.tree.leaves`."""

    arrays: tuple[jax.Array, ...]

    def __init__(self, model: PlacedModel, args: ServerArgs, progress: Progress) -> None:
        self._args = args
        self._load = partial(
            load_params,
            model,
            seed=args.random_seed,
            kv_cache_scales=args.kv_cache_scales,
            draft_model_path=args.speculative_draft_model_path,
            check_all_weights=args.check_weights == "all",
            progress=progress,
        )

    def load_first(self) -> ParamTree:
        """Load the weights of `--model-path`; return them as the model's parameters."""
        params = self._load(self._args.model_path, self._args.load_format)
        self.arrays = tuple(jax.tree.leaves(params))
        return params

    def replace(self, model_path: str) -> LoadFailure | None:
        """Load the weights of another folder; the old weights stay until then, and if that fails.
        Return the failure as text: an exception would keep the arrays loaded so far. If one host
        fails, all hosts do."""
        weights: tuple[jax.Array, ...] = ()
        failure = None
        try:
            params = self._load(model_path, detect_format(Path(model_path)))
            weights = jax.block_until_ready(tuple(jax.tree.leaves(params)))
        except Exception as error:  # such as a bad file, or too little memory
            logger.exception("the weights in %r could not be loaded", model_path)
            reason = f"the weights in {model_path!r} could not be loaded: {error}"
            failure = LoadFailure(reason, lacks_room="RESOURCE_EXHAUSTED" in str(error))
        # 0: loaded; 1: not loaded; 2: not loaded, for lack of room.
        codes = of_each_host(0 if failure is None else 1 + failure.lacks_room)
        if not any(codes):
            self.arrays = weights
            return None
        reason = f"a host could not load the weights in {model_path!r}; see its log"
        return LoadFailure(reason if failure is None else failure.reason, max(codes) == 2)


def stored_model(model_path: str, load_format: str, args: ServerArgs) -> tuple[ModelConfig, str]:
    """Return the model of a folder, as defined by its weights and `args`, and the weights' format.
    Raises ModelConfigError, or CheckpointError for weights that cannot be read."""
    config = served_config(ModelConfig.from_path(model_path), args)
    if load_format == "auto":
        load_format = detect_format(Path(model_path))
    folder, is_embedding = Path(model_path), args.is_embedding
    return with_stored_head(config, folder, load_format, is_embedding=is_embedding), load_format
