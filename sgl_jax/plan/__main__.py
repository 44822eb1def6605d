"""`python -m sgl_jax.plan`; see `sgl_jax.plan.command`."""

import sys

from sgl_jax.plan.command import main

sys.exit(main())
