"""State space models (Mamba-2), over states that the engine keeps in slots."""
