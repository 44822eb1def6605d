"""Values of the model at each token, which a request may ask for: `return_routed_experts`,
`return_hidden_states`.

They are not stored with the KV cache. A request computes each token that it reports, and takes
cached prefixes only up to the first of them.
"""

# Names and types in messages. The i-th is bit i of a mask.
TOKEN_VALUES = {
    "routed_experts": "<i2",  # [layers, top_k]; zeros in layers without experts
    "hidden_states": "<f4",  # [hidden_size] of the last layer, after the final norm
}


def named_values(mask: int) -> list[str]:
    """Return the names of the values in `mask`."""
    return [name for i, name in enumerate(TOKEN_VALUES) if mask >> i & 1]
