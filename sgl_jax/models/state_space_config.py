"""State space layers (Mamba-2), and layers of a single part, from config.json."""

import math
from collections.abc import Mapping
from typing import Any

from sgl_jax.core.layer_configs import StateSpaceConfig
from sgl_jax.models.config_fields import (
    ModelConfigError,
    is_int,
    positive_float,
    positive_int,
    switch,
)


def read_state_space(raw: Mapping[str, Any]) -> StateSpaceConfig:
    """Return the sizes of config.json's contents `raw`. Raise ModelConfigError."""
    groups, heads = (positive_int(raw, f"mamba_n_{x}") for x in ("groups", "heads"))
    if heads % groups:
        raise ModelConfigError(
            f"mamba_n_heads ({heads}) must be a multiple of mamba_n_groups ({groups})"
        )
    head_dim = _head_dim(raw, heads)
    conv_size = positive_int(raw, "mamba_d_conv")
    if conv_size < 2:
        raise ModelConfigError("mamba_d_conv must be 2 or more, got 1")
    min_step, max_step = _step_limits(raw)
    return StateSpaceConfig(
        num_groups=groups,
        num_heads=heads,
        state_dim=positive_int(raw, "mamba_d_state"),
        head_dim=head_dim,
        conv_size=conv_size,
        has_conv_bias=switch(raw, "mamba_conv_bias"),
        min_step=min_step,
        max_step=max_step,
    )


def _head_dim(raw: Mapping[str, Any], heads: int) -> int:
    """Return the size of a head; with `mamba_expand`, heads have so many times the hidden size."""
    if raw.get("mamba_expand") is None:
        return positive_int(raw, "mamba_d_head")
    width = positive_int(raw, "mamba_expand") * positive_int(raw, "hidden_size")
    is_open = raw.get("mamba_d_head") in (None, "auto")
    head_dim = width // heads if is_open else positive_int(raw, "mamba_d_head")
    if head_dim * heads != width:
        raise ModelConfigError(
            f"mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) must be mamba_expand * "
            f"hidden_size ({width})"
        )
    return head_dim


def _step_limits(raw: Mapping[str, Any]) -> tuple[float, float]:
    limits = raw.get("time_step_limit") or (0.0, math.inf)
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ModelConfigError(f"time_step_limit must be two numbers, got {limits!r}")
    # transformers writes an infinite number as an object.
    least, most = (math.inf if value == {"__float__": "Infinity"} else value for value in limits)
    for value in (least, most):
        if not (is_int(value) or isinstance(value, float)) or not value >= 0:
            raise ModelConfigError(f"time_step_limit must be numbers from 0 on, got {value!r}")
    if raw.get("time_step_min"):  # the lower limit, in a separate field
        least = max(least, positive_float(raw, "time_step_min"))
    return float(least), float(most)
