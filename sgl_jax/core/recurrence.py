"""The shape of a layer's recurrence, in the place of attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedDeltaConfig:
    """A gated delta net (see `layers.gated_delta_net`), over all the chips of a rank."""

    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads, the ones of one key head are neighbours
    key_dim: int  # of a head
    value_dim: int
    conv_size: int  # tokens that the convolution before it sees, the newest among them

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_head_channels(self) -> int:
        """Channels convolved for a key head: its query, its key, the values of its value heads."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def channels(self) -> int:
        return self.num_key_heads * self.key_head_channels


# Elements of a row of a TPU's memory.
_LANES = 128


def conv_state_shape(width: int, channels: int) -> tuple[int, int]:
    """The layout of a convolution's state: the last `width` - 1 inputs, one after the other.

    In rows of 128 if an input fills them: then a TPU moves a state as it is. For [width - 1,
    channels] its compiler makes another layout, to which all states would be copied in each step.
    """
    rows_each = channels // _LANES if channels % _LANES == 0 else 1
    return (width - 1) * rows_each, channels // rows_each
