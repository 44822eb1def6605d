"""Expert dispatch for TPU: `routing` chooses and sorts, `moves` copies tokens to lines and back."""

from sgl_jax.kernels.expert_dispatch.tpu.moves import tpu_add, tpu_gate, tpu_gather
from sgl_jax.kernels.expert_dispatch.tpu.routing import tpu_choose, tpu_sort

__all__ = ["tpu_add", "tpu_choose", "tpu_gate", "tpu_gather", "tpu_sort"]
