"""Qwen2 and Qwen2.5: Llama with biases on the projections of Q, K and V."""

from functools import partial

from sgl_jax.models.llama import llama_layer

qwen2_layer = partial(llama_layer, qkv_bias=True)
