"""Shapes of layers: latent attention, recurrences, experts, quantized weights."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Elements in the last dimension of a TPU memory tile.
_LANES = 128


@dataclass(frozen=True)
class IndexerConfig:
    """Sizes of an indexer, which chooses the tokens that each query attends to (DeepSeek sparse
    attention, arXiv 2512.02556); see `layers.indexer`."""

    num_heads: int
    head_dim: int  # of its queries, and of the one key that a token has for all of them
    top_k: int  # tokens that a query attends to, if so many are before it
    pairs_neighbours: bool = False  # the checkpoint's dimensions 2i and 2i + 1 rotate together
    # The layer has no indexer: it attends to the tokens that the last layer with one chose.
    reuses: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of an attention layer with keys and values computed from a compressed latent
    (multi-head latent attention, arXiv 2405.04434); see `layers.latent_attention`."""

    rank: int  # size of a token's latent
    nope_dim: int  # part of a head's query and key without a position, derived from the latent
    rope_dim: int  # rotated part of a head's query and key; all heads share one rotated key
    value_dim: int  # size of a head's value
    query_rank: int | None  # size of the queries' latent; None: queries from hidden states
    indexer: IndexerConfig | None = None  # None: a query attends to all tokens before it

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Return the size of a latent with the rotated part of its key."""
        return self.rank + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Return the size of a token's key of the indexer."""
        return self.indexer.head_dim if self.indexer else 0


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Sizes of a gated delta net (see `layers.gated_delta_net`), over all chips of a rank."""

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads; value heads of one key head are adjacent
    key_dim: int  # per head
    value_dim: int  # per head
    conv_size: int  # width in tokens of the causal convolution of queries, keys and values
    decays_by_channel: bool = False  # each channel of a key has a decay

    @property
    def group(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def key_head_channels(self) -> int:
        """Return the convolved channels of a key head: query, key and all its value heads."""
        return 2 * self.key_dim + self.group * self.value_dim

    def chip_channels(self, tp_size: int) -> int:
        """Return the convolved channels of one of `tp_size` chips."""
        return self.num_key_heads * self.key_head_channels // tp_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of a recurrent state; chips share the first axis."""
        return self.num_value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class StateSpaceConfig:
    """Sizes of a state space model (see `layers.state_space`), over all chips of a rank."""

    num_groups: int  # of adjacent heads with the same keys (B) and queries (C)
    num_heads: int  # a multiple of num_groups
    state_dim: int  # of keys and queries
    head_dim: int  # of values
    conv_size: int  # width in tokens of the causal convolution of values, keys and queries
    has_conv_bias: bool = True
    min_step: float = 0.0  # limits of a token's step (dt)
    max_step: float = math.inf

    @property
    def packed_heads(self) -> int:
        """Return the number of heads side by side in the last axis of a state.

        Heads smaller than a row of a TPU's memory fill it together.
        """
        heads = _LANES // self.head_dim if _LANES % self.head_dim == 0 else 1
        fills = self.state_dim % _LANES == 0 and self.num_heads // self.num_groups % heads == 0
        return heads if fills else 1

    def chip_groups(self, tp_size: int) -> int:
        """Return the number of groups on each of `tp_size` chips; at least 1, a part of a group."""
        return max(self.num_groups // tp_size, 1)

    def chip_channels(self, tp_size: int) -> int:
        """Return the convolved channels of one of `tp_size` chips."""
        values = self.num_heads * self.head_dim // tp_size
        return values + 2 * self.chip_groups(tp_size) * self.state_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of a recurrent state; chips share the first axis."""
        return (
            self.num_heads // self.packed_heads,
            self.state_dim,
            self.packed_heads * self.head_dim,
        )


Recurrence = GatedDeltaConfig | StateSpaceConfig


def conv_state_shape(width: int, channels: int) -> tuple[int, int]:
    """Return the shape of a convolution's state: its last `width` - 1 inputs in order.

    If `channels` is a multiple of 128, each input is split into rows of 128, so that a TPU can move
    a state without a copy. For [width - 1, channels] the compiler would choose a different layout
    and copy all states to it in each step.
    """
    rows_each = channels // _LANES if channels % _LANES == 0 else 1
    return (width - 1) * rows_each, channels // rows_each


class ExpertChoice(NamedTuple):
    """Choose the `top_k` experts with the highest scores; their weights are their scores.

    With groups (arXiv 2405.04434), adjacent experts form groups of equal size, and a token's
    experts come only from its `top_groups` best groups. The score of a group is the sum of its
    `best_of_group` highest scores.
    """

    top_k: int
    norm_topk_prob: bool  # scale the weights of the chosen experts to sum to 1
    has_sigmoid_scores: bool = False  # else scores are a softmax over all experts
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0  # multiplies weights

    @property
    def is_plain(self) -> bool:
        """Return True for a softmax over all experts without groups or `scale`."""
        return not self.has_sigmoid_scores and self.num_groups == 1 and self.scale == 1.0


WeightFormat = Literal["int8", "fp8", "int4", "mxfp4"]
ActivationFormat = Literal["int8", "fp8"]

MXFP4_GROUP = 32  # inputs that share a scale (OCP Microscaling Formats specification, version 1.0)
# Largest magnitudes that quantizing a float produces. int8 and int4 do not use their minimum (the
# magnitude is one larger), so that a number and its negative are rounded alike.
GREATEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "mxfp4": 6.0}


class Scheme(NamedTuple):
    """A quantized element of the matrix is (value - zero point) * scale.

    There is a scale for each output, or for each output and group of inputs. Quantized activations
    have a scale for each token.
    """

    weight: WeightFormat
    group_size: int | None = None  # inputs that share a scale; None: all
    has_zero_points: bool = False
    has_input_order: bool = False  # inputs of a group are not adjacent, see `QuantizedMatrix`
    activation: ActivationFormat | None = None  # None: not quantized
    has_input_scale: bool = False  # one activation scale from the checkpoint for all tokens

    @property
    def name(self) -> str:
        """Return a description such as "int4 in groups of 128, with zero points"."""
        in_groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        parts = [self.weight + in_groups]
        parts += ["with zero points"] * self.has_zero_points
        parts += ["in activation order"] * self.has_input_order
        kind = "static" if self.has_input_scale else "dynamic"
        parts += [f"{kind} {self.activation} activations"] * (self.activation is not None)
        return ", ".join(parts)
