"""Structured output: masks of the tokens that a grammar allows next.

Owns llguidance, which makes masks from grammars. Steps and rows are the engine's business: it
requests the mask of an output, and the executor samples with it.
"""
