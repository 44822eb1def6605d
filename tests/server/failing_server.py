"""The real server process, whose engine fails every step. Takes the flags of
`sgl_jax.launch_server`."""

import logging
import sys

from sgl_jax.core.command_line import parse_server_args
from sgl_jax.server.lifecycle import serve

if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    sys.exit(serve(parse_server_args(), (sys.executable, "-m", "tests.engine.failing_engine")))
