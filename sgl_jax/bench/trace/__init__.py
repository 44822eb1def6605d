"""Run recorded traffic through the real scheduler and memory stack, without a device."""
