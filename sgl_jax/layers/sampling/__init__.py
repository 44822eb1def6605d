"""Choosing the next token on the device: parameters per row, penalties, filters, noise.

Owns the order in which a request's sampling parameters act on its logits. Never reads the host:
everything comes from device-resident tables indexed by row, so a step needs no upload for it.
"""
