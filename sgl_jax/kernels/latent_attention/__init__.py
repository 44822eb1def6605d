"""Attention to latents: one row a token for all heads, instead of a key and a value per head."""
