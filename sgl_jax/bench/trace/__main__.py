"""`python -m sgl_jax.bench.trace`; see `sgl_jax.bench.trace.command`."""

import sys

from sgl_jax.bench.trace.command import main

sys.exit(main())
