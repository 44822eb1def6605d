"""Mamba-2 layers: their tensors, split over chips by groups of heads or by parts of a group."""

from sgl_jax.core.layer_configs import StateSpaceConfig
from sgl_jax.layers.gated_delta_net import DepthwiseConv
from sgl_jax.layers.head_sources import ByHead, HeadRows
from sgl_jax.layers.sources import Slice, Tensor
from sgl_jax.layers.state_space import GroupedNorm, Mamba2
from sgl_jax.models.architecture import BuildOptions
from sgl_jax.models.config import LayerSpec, ModelConfig
from sgl_jax.models.llama import require_divisible
from sgl_jax.models.projections import linear


def mamba2(
    config: ModelConfig,
    spec: LayerSpec,
    own: StateSpaceConfig,
    options: BuildOptions,
    prefix: str,
) -> Mamba2:
    """Declare a layer's state space model; `prefix` is that of its tensors.

    Raises ValueError if `tp_size` chips cannot split the heads.
    """
    tp_size, dtype, hidden = options.tp_size, options.dtype, config.hidden_size
    require_divisible("the number of state space heads", own.state_shape[0], tp_size)
    if max(tp_size, own.num_groups) % min(tp_size, own.num_groups):
        raise ValueError(
            f"tp_size ({tp_size}) must divide the groups of state space heads "
            f"({own.num_groups}), or be a multiple of them"
        )
    width, keys = own.num_heads * own.head_dim, own.num_groups * own.state_dim
    # Its rows: gates, values, keys, queries, steps.
    num_rows = 2 * width + 2 * keys + own.num_heads
    whole = Tensor(f"{prefix}in_proj.weight", (hidden, num_rows), transposed=True)
    gate = Slice(whole, 1, 0, width)
    steps = Slice(whole, 1, num_rows - own.num_heads, own.num_heads)
    output = Tensor(f"{prefix}out_proj.weight", (width, hidden), transposed=True)
    conv = _by_group(own, options, f"{prefix}conv1d.weight", 0, 0, (1, own.conv_size))
    conv_bias = _by_group(own, options, f"{prefix}conv1d.bias", 0, 0, ())
    inputs = _by_group(own, options, f"{prefix}in_proj.weight", width, own.num_heads, (hidden,))
    return Mamba2(
        linear(spec, options, inputs, "outputs"),
        linear(spec, options, gate, "outputs"),
        linear(spec, options, steps, "outputs"),
        DepthwiseConv(
            conv, dtype, options.kernels.causal_conv, conv_bias if own.has_conv_bias else None
        ),
        Tensor(f"{prefix}A_log", (own.num_heads,)),
        Tensor(f"{prefix}dt_bias", (own.num_heads,)),
        Tensor(f"{prefix}D", (own.num_heads,)),
        GroupedNorm(
            Tensor(f"{prefix}norm.weight", (width,)), config.rms_norm_eps, dtype, own.num_groups
        ),
        linear(spec, options, output, "inputs"),
        sizes=own,
        recur=options.kernels.state_space,
    )


def _by_group(
    own: StateSpaceConfig,
    options: BuildOptions,
    name: str,
    num_before: int,
    num_after: int,
    inputs: tuple[int, ...],
) -> ByHead:
    """Return the rows of the tensor `name`, in the order of groups: values, keys, queries.

    Chips that share a group have parts of its values, and all of its keys and queries. The tensor
    has other rows before and after.
    """
    parts = max(options.tp_size, own.num_groups)
    copies, values = parts // own.num_groups, own.num_heads * own.head_dim // parts
    size, keys = own.state_dim, own.num_groups * own.state_dim
    first = num_before + parts * values
    num_rows = first + 2 * keys + num_after
    return ByHead(
        (
            HeadRows(name, num_rows, num_before, values, values),
            HeadRows(name, num_rows, first, size, size, copies=copies),
            HeadRows(name, num_rows, first + keys, size, size, copies=copies),
        ),
        parts,
        inputs,
    )
