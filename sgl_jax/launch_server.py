"""The command line: `python -m sgl_jax.launch_server --model-path X`, or `sgl-jax serve ...`.

`sgl-jax plan ...` runs the planner (`sgl_jax.planner`), `sgl-jax bench ...` benchmarks
(`sgl_jax.bench`), `sgl-jax doctor ...` checks a machine (`sgl_jax.doctor`).
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.core.command_line import parse_server_args
from sgl_jax.core.errors import FAILED
from sgl_jax.core.log_lines import log_to_terminal
from sgl_jax.multihost.group import with_group
from sgl_jax.server.lifecycle import serve
from sgl_jax.server.multihost_worker import serve_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand named by the first word, else serve a model; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["plan"]:
        # Imported here, so that a server starts without the planner's imports.
        from sgl_jax.planner.__main__ import main as plan

        return plan(words[1:])
    if words[:1] == ["bench"]:
        from sgl_jax.bench.__main__ import main as bench

        return bench(words[1:])
    if words[:1] == ["doctor"]:
        from sgl_jax.doctor.__main__ import main as doctor

        return doctor(words[1:])
    if words[:1] == ["serve"]:
        words = words[1:]
    args = parse_server_args(words)
    log_to_terminal(args.log_level, args.log_format)
    try:
        args = with_group(replace(args, model_path=model_folder(args.model_path)))
    except (OSError, ValueError) as error:
        print(f"sgl_jax cannot serve: {error}", file=sys.stderr, flush=True)
        return FAILED
    return serve_worker(args) if args.node_rank else serve(args)


if __name__ == "__main__":
    sys.exit(main())
