"""Readers of quantized matrices in files, one for each packing; `tensors` selects one."""
