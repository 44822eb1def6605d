"""Gated delta nets and their convolution, over states that the engine keeps in slots."""
