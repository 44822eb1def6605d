"""Structured output: masks of the tokens that a grammar allows next.

Owns llguidance, which computes masks from grammars. Steps and rows belong to the engine, which
requests the mask of an output, and to the executor, which samples with it.
"""
