"""Attention to latents: one row a token for all heads, in place of a key and a value a head."""
