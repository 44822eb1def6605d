"""Stand-ins that let the scheduler and the memory stack run without a model or a device.

Used by tests and by benchmarks of the host; nothing that serves imports it.
"""
