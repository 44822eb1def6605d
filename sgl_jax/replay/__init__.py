"""Run a recording of scheduler events again: `python -m sgl_jax.replay FILE`. Never imports jax."""
