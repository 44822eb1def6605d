"""The engine process, whose compiler never ends: `python -m tests.engine.stalled_compiler`."""

import threading

from sgl_jax.engine.__main__ import main
from sgl_jax.executor.model_executor import ModelExecutor
from sgl_jax.executor.programs import Programs


def never_end(programs: Programs, *_: object) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    ModelExecutor.warm_up = lambda executor: None
    Programs.halves = never_end
    main()
