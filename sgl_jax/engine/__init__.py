"""Wires scheduler and executor; the offline API; the engine process."""
