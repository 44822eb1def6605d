"""Structured output: which tokens may come next where an output is held to a grammar.

Owns llguidance, which makes masks of tokens from grammars. Knows of no step and no row: the engine
asks for the mask of an output, and the executor draws by it.
"""
