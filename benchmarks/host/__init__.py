"""The host's time: scheduling a step, matching prefixes, moving pages, evicting, checking.

No device and no jax: a fake executor answers at once, so that all time measured is the host's.
Times are processor time of this thread, which other work on the machine does not blur. It never
decides whether a time is good enough.

    python -m benchmarks.host [--quick]
"""
