"""Attention of prefill chunks on TPU: many queries a row, over all of the row's KV.

Prefill is bound by the matrix unit, so the kernel is built around its matmuls. A block of a row's
queries stays in vector memory while the row's keys pass by in blocks; of each KV head, the queries
of all heads of its group are one matrix. Softmax is online (arXiv 2205.14135), in float32 and in
powers of two; a query's greatest score is kept in all lanes, its denominator as a sum for each
lane, so that nothing changes its layout between blocks.

Keys that all queries of the block see come first, without any mask; then those on the diagonal, at
the row's end or at the window's edge. While a block of keys is computed on, the next one is in
flight, and the next one may be the first of the next block of queries, or of the next row.
"""
