"""The weights on the devices, which can be replaced by those of another folder or by arrays."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from sgl_jax.checkpoint.arriving import ArrivingWeights, Leaf
from sgl_jax.checkpoint.loading import detect_format, load_params
from sgl_jax.checkpoint.stored_head import with_stored_head
from sgl_jax.core.progress import Progress
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.layers.mesh_axes import of_each_host
from sgl_jax.layers.parameter import ParamTree
from sgl_jax.layers.parameter import Path as ParamPath
from sgl_jax.layers.tensor_keys import Places
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


class WeightUpdate:
    """New weights that arrive as tensors.

    They are kept next to the served weights until they are complete, or replace them one parameter
    at a time (`is_chunked`). Must never compile, and never share a buffer with a tensor's owner.

    Attributes:
        params: the parameters made so far.
    """

    def __init__(
        self, arriving: ArrivingWeights, drop_served: Callable[[ParamPath], None] | None
    ) -> None:
        """Start an update; `drop_served` deletes the served array of a parameter: chunked."""
        self.params: dict[ParamPath, Leaf] = {}
        self.is_chunked = drop_served is not None
        self._arriving = arriving
        self._drop_served = drop_served

    def add(self, tensors: Mapping[str, Any]) -> None:
        """Take tensors (`ArrivingWeights.add`), and make the parameters that they complete. May run
        on any thread, one call at a time. Raises CheckpointError; then the update is useless."""
        with jax.transfer_guard("allow"):
            self._arriving.add(tensors)
            try:
                for path in self._arriving.ready():
                    drop = partial(self._drop_served, path) if self._drop_served else _keep
                    self.params[path] = self._arriving.make(path, drop)
            finally:  # the tensors' owner may change or donate them
                jax.block_until_ready(self.params)

    @property
    def missing(self) -> set[str]:
        """Return the names of the tensors that must still arrive."""
        return self._arriving.missing()

    def check_complete(self) -> None:
        """Raise CheckpointError, with their names, if tensors are missing."""
        self._arriving.check_complete()


class ServedWeights:
    """The weights of a model.

    Attributes:
        arrays: the parameters, in the order of `jax.tree.leaves`.
    """

    arrays: tuple[jax.Array, ...]

    def __init__(self, model: PlacedModel, args: ServerArgs, progress: Progress) -> None:
        self._model = model
        self._args = args
        self._deleted = set[ParamPath]()  # by a chunked update or `release`, and not replaced since
        self._load = partial(
            load_params,
            model,
            seed=args.random_seed,
            kv_cache_scales=args.kv_cache_scales,
            draft_model_path=args.speculative_draft_model_path,
            check_all_weights=args.check_weights == "all",
            progress=progress,
        )

    def load_first(self) -> None:
        """Load the weights of `--model-path`."""
        self._use(flatten_mapping(self._load(self._args.model_path, self._args.load_format)))

    def _use(self, params: Mapping[ParamPath, Leaf]) -> None:
        self._params = dict(params)
        self.arrays = tuple(jax.tree.leaves(unflatten_mapping(self._params)))

    def with_places(self) -> list[tuple[jax.Array, Places | None]]:
        """Return all parameters, each with `Source.plain_places` unless it is plain."""
        found: list[tuple[jax.Array, Places | None]] = []
        for path, leaf in sorted(self._params.items()):
            source = self._model.declared[path].source
            places = None if source is None or source.is_plain else source.plain_places()
            if isinstance(leaf, tuple):  # an array for each layer
                found += [(array, places and places[1:]) for array in leaf]
            else:
                found.append((leaf, places))
        return found

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of a checkpoint's tensors."""
        return ArrivingWeights(self._model, check_all=False).expected_shapes

    @property
    def is_mixed(self) -> bool:
        """Return whether parameters were deleted, or are of other weights than the rest."""
        return bool(self._deleted)

    def begin_update(self, *, is_chunked: bool) -> WeightUpdate:
        """Return an update without tensors; end it by `finish_update`."""
        arriving = ArrivingWeights(
            self._model,
            check_all=self._args.check_weights == "all",
            needs_drafts=any(path[0] == "draft_layer" for path in self._deleted),
        )
        return WeightUpdate(arriving, self._delete if is_chunked else None)

    def finish_update(self, update: WeightUpdate) -> None:
        """Serve the parameters of a complete update. Parameters that no checkpoint holds stay."""
        params = update.params.copy()  # a thread may refuse another message meanwhile
        self._use(self._params | params)
        self._deleted -= params.keys()

    def release(self) -> None:
        """Delete the arrays of the checkpoint's parameters, except for those of a draft layer,
        which an update may lack."""
        for path in self._params:
            if self._model.declared[path].source is not None and path[0] != "draft_layer":
                self._delete(path)

    def _delete(self, path: ParamPath) -> None:
        self._deleted.add(path)
        for array in jax.tree.leaves(self._params[path]):
            array.delete()

    def replace(self, model_path: str) -> LoadFailure | None:
        """Load the weights of another folder; the old weights stay until then, and if that fails.
        Return the failure as text: an exception would keep the arrays loaded so far. If one host
        fails, all hosts do."""
        params: ParamTree = {}
        failure = None
        try:
            params = self._load(model_path, detect_format(Path(model_path)))
            jax.block_until_ready(params)
        except Exception as error:  # such as a bad file, or too little memory
            logger.exception("the weights in %r could not be loaded", model_path)
            reason = f"the weights in {model_path!r} could not be loaded: {error}"
            failure = LoadFailure(reason, lacks_room="RESOURCE_EXHAUSTED" in str(error))
        # 0: loaded; 1: not loaded; 2: not loaded, for lack of room.
        codes = of_each_host(0 if failure is None else 1 + failure.lacks_room)
        if not any(codes):
            self._use(flatten_mapping(params))
            self._deleted.clear()
            return None
        reason = f"a host could not load the weights in {model_path!r}; see its log"
        return LoadFailure(reason if failure is None else failure.reason, max(codes) == 2)


def _keep() -> None:
    """Keep the served array of a parameter."""


def stored_model(model_path: str, load_format: str, args: ServerArgs) -> tuple[ModelConfig, str]:
    """Return the model of a folder, as defined by its weights and `args`, and the weights' format.
    Raises ModelConfigError, or CheckpointError for weights that cannot be read."""
    config = served_config(ModelConfig.from_path(model_path), args)
    if load_format == "auto":
        load_format = detect_format(Path(model_path))
    folder, is_embedding = Path(model_path), args.is_embedding
    return with_stored_head(config, folder, load_format, is_embedding=is_embedding), load_format
