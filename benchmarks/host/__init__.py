"""The host's time: scheduling a step, matching prefixes, moving pages, evicting, checking.

    python -m benchmarks.host [--quick]

No device and no jax: a fake executor answers at once, so all measured time is the host's. Times are
processor time of this thread, which other work on the machine hardly affects. No time fails the
command.
"""
