"""`sgl-jax bench {serve,trace,fleet}`: load a running server, replay traffic on one engine, or
replay it on many engines."""

import sys
from collections.abc import Sequence

_USAGE = "usage: sgl-jax bench {serve,trace,fleet} ..."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark named by the first word; return the exit code, 2 for any other word."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Imported on use: only `serve` needs aiohttp, only the other two need the scheduler.
    if words[:1] == ["serve"]:
        from sgl_jax.bench.serve import main as serve

        return serve(words[1:])
    if words[:1] == ["trace"]:
        from sgl_jax.bench.trace.command import main as trace

        return trace(words[1:])
    if words[:1] == ["fleet"]:
        from sgl_jax.bench.fleet.command import main as fleet

        return fleet(words[1:])
    is_help = words[:1] in (["-h"], ["--help"])
    print(_USAGE, file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main())
