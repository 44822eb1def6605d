"""What the layers of a model read in a step, next to hidden states and memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from sgl_jax.kernels.attention.batch import AttentionBatch
from sgl_jax.kernels.gated_delta.batch import StateBatch
from sgl_jax.layers.rotary import Rotation, query_scales, rotation
from sgl_jax.models.config import LayerSpec, ModelConfig


def layer_reads(
    config: ModelConfig,
    groups: Sequence[int],
    positions: jax.Array,
    batches: Sequence[AttentionBatch],
    state_batch: StateBatch | None,
    spans: jax.Array | None = None,
) -> list[tuple[Any, ...]]:
    """Return each layer's rotation and batch, its `StateBatch` if it is a recurrence, or nothing.

    `groups` are the layers' cache groups, and `batches` those of each group. `positions` are as in
    `rotation_of`. `spans` are the images of the rows, for layers that see them whole.
    """
    vision = config.vision
    rotations: dict[Any, Rotation] = {}  # equal ones are computed once
    reads: list[tuple[Any, ...]] = []
    for spec, group in zip(config.layers, groups, strict=False):
        if spec.recurrence:
            reads.append((state_batch,))
            continue
        if not spec.mixes_tokens:
            reads.append(())
            continue
        key = spec.rope, spec.query_scale, spec.heads
        if key not in rotations:
            rotations[key] = rotation_of(config, spec, positions)
        batch = batches[group]
        if spans is not None and vision is not None and vision.sees_whole(spec.sliding_window):
            batch = replace(batch, spans=spans)
        reads.append((rotations[key], batch))
    return reads


def rotation_of(config: ModelConfig, spec: LayerSpec, positions: jax.Array) -> Rotation:
    """Return the rotations of queries and keys of a layer at `positions`, int32 [T].

    With images, positions are [3, T]: time, row and column, see `VisionConfig.pair_axes`.
    """
    size = config.of_layer(spec).rope_head_dim
    rope, scale = spec.rope, spec.query_scale
    # Without rotation all angles are 0.
    frequencies = rope.inverse_frequencies(size) if rope else np.zeros(0, np.float32)
    factor = rope.attention_factor if rope else 1.0
    if config.vision is not None and positions.ndim > 1:
        axes = np.array(config.vision.pair_axes(size // 2))
        return rotation(positions[axes].T, frequencies, factor, size // 2)
    own = rotation(positions, frequencies, factor, size // 2)
    if scale is None:
        return own
    scales = query_scales(positions, scale.weight, scale.period, scale.first)
    return own._replace(query_scale=scales)
