"""Attention of decode rows on TPU: one query a row, or one and its drafts, over all of its KV.

Decode is bound by memory, so the kernel is built around its DMAs: a page of one layer is
contiguous, K heads then V heads, and comes as one DMA; a block of pages is computed on while the
next one is in flight, and the next block may be the first one of the next row.

A block that all of the row's queries see is computed on at once, without masks. Where masks are
needed, at a row's end or its window's edge, parts of a block follow each other, and parts that
the row does not reach cost nothing.

KV heads are stacked: their keys lie side by side and make one matrix of 256 columns or more, as
wide as the matrix unit, and each head's queries are rows of their own, with zeros beside the
columns of other heads. So scores of several heads share registers that a few queries would not
fill, and the unit is loaded in fewer steps. Softmax is online (arXiv 2205.14135), in float32.
"""
