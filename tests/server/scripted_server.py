"""The real server process with a scripted engine in place of the real one.

Takes the flags of `sgl_jax.launch_server`; `--random-seed` is the engine's step time in ms.
"""

import logging
import sys

from sgl_jax.core.command_line import parse_server_args
from sgl_jax.server.lifecycle import serve

if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    sys.exit(serve(parse_server_args(), (sys.executable, "-m", "tests.engine.scripted_engine")))
