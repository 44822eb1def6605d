"""The command line: `python -m sgl_jax.launch_server --model-path X`, or `sgl-jax serve ...`."""

import logging
import sys
from collections.abc import Sequence

from sgl_jax.core.server_args import parse_server_args
from sgl_jax.server.lifecycle import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a model; returns the exit code. The word `serve` may stand first."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"]:
        words = words[1:]
    args = parse_server_args(words)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return serve(args)


if __name__ == "__main__":
    sys.exit(main())
