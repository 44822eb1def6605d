"""How much vector memory a kernel may take; the compiler's own limit is less (16 MiB on a v5e)."""

VMEM_LIMIT_BYTES = 60 << 20  # of the 64 MiB or more that a chip has
