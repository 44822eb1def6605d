"""What declares a model besides its config: its family's `Architecture`, and the `BuildOptions`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from sgl_jax.layers.kernels import Kernels
from sgl_jax.layers.mesh_axes import MESH_AXES, TENSOR_AXIS, MeshAxes
from sgl_jax.layers.per_layer_embedding import PerLayerEmbedding
from sgl_jax.layers.sources import Padded, Source
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.decoder_layer import DecoderLayer
from sgl_jax.models.expert_placement import ExpertPlacement
from sgl_jax.models.vision_tower import VisionTower


class BuildOptions(NamedTuple):
    """The kernels, dtypes and mesh for which a model is built."""

    dtype: DTypeLike
    shards_weights: bool = False  # each rank holds its part of a layer, and gathers it to run it
    kernels: Kernels = Kernels()
    has_kv_scales: bool = False  # declare the scales of an 8-bit KV cache
    separates_layers: bool = False  # layers have separate matrices, see `layers.layer_weights`
    widens_int4: bool = False  # int4 is int8 in memory: a CPU's programs reject int4 (jax 0.10.2)
    # Choices between compiled programs (docs/measurements/planning.md): the layers in one iteration
    # of the loop, in whole periods, and whether the next layer's norm computes a layer's last sum.
    unrolled_layers: int = 1
    defers_sum: bool = False
    ep_size: int = 1  # chips with distinct experts: 1, all of a rank or all of the mesh
    placement: ExpertPlacement | None = None  # of distributed experts; None: in order
    counts_experts: bool = False  # the model returns how often each expert was chosen
    returns_experts: bool = False  # the model returns each token's experts
    returns_hidden_states: bool = False  # steps report each token's hidden state
    sequence_parallel: bool = False  # each chip of a rank has a share of the tokens
    tp_size: int = 1  # chips of a rank, and ranks: `place_model` takes them from its mesh
    dp_size: int = 1

    @property
    def expert_axes(self) -> MeshAxes:
        """Return the mesh axes that split whole experts; None if chips share each expert."""
        if self.ep_size == 1:
            return None
        return TENSOR_AXIS if self.ep_size == self.tp_size else MESH_AXES

    def all_experts(self, part: Source) -> Source:
        """Pad `part` [experts, ...] with zeros to a multiple of the chips, without a placement."""
        if self.placement is not None:
            return part
        return Padded(part, -(-part.shape[0] // self.ep_size) * self.ep_size, axis=0)

    @property
    def expert_slices(self) -> int:
        """Return the number of chips that share each expert's inner width."""
        return 1 if self.expert_axes else self.tp_size


# Declares one layer of an architecture; tensor names are relative to the layer.
LayerBuilder = Callable[[ModelConfig, LayerSpec, BuildOptions], DecoderLayer]


class Architecture(NamedTuple):
    """A family of models: its layer builder, and the names of its tensors."""

    build_layer: LayerBuilder
    norms_from_one: bool = False  # of the last norm, see `RMSNorm`; layers set this for their norms
    scales_embedding: bool = False  # by the square root of the hidden size
    body: str = "model."  # prefix of all tensors except the head's
    head: str = "lm_head"
    embeddings: str = "embed_tokens"
    last_norm: str = "norm"
    declare_tower: Callable[[Any, DTypeLike], VisionTower] | None = None
    spare_prefixes: tuple[str, ...] = ()  # prefixes of tensors that no parameter needs
    has_further_layers: bool = False  # the checkpoint's layers after the last are not read
    # Prefixes, in a layer that reads another layer's cache or choice, of tensors that it lacks.
    unused_in_sharing_layers: tuple[str, ...] = ()
    declare_per_layer_embedding: Callable[
        [ModelConfig, BuildOptions, str], PerLayerEmbedding | None
    ] = lambda *_: None

    @property
    def embeddings_tensor(self) -> str:
        return f"{self.body}{self.embeddings}.weight"

    @property
    def head_tensor(self) -> str:
        return f"{self.head}.weight"
