"""Values that the hosts of one engine must agree on before they continue."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def of_each_host(value: int) -> list[int]:
    """Return each host's `value`, in rank order; all hosts must call this in the same order."""
    if jax.process_count() == 1:
        return [value]
    gathered: list[int] = multihost_utils.process_allgather(np.array(value, np.int32)).tolist()
    return gathered
