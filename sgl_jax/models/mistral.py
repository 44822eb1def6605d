"""Mistral: Llama with a window on every layer, which is the config's to say."""

from sgl_jax.models.llama import llama_layer

mistral_layer = llama_layer
