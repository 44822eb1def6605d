"""The parent's handle on the process from which text workers are forked (`worker.py`)."""

import contextlib
import os
import socket
import subprocess
import sys


class TextWorkers:
    """Starts the process, again if it has ended, and sends it a socket for each new worker."""

    def __init__(self, tokenizer_path: str, chat_template: str | None = None) -> None:
        self._arguments = [path for path in (tokenizer_path, chat_template) if path is not None]
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start loading the tokenizer, unless that was started before. Does not wait."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._control, theirs = socket.socketpair()
        # The process forks, which is not safe with the threads of the tokenizer and of numpy.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            command = (sys.executable, "-m", "sgl_jax.text.worker", str(theirs.fileno()))
            self._process = subprocess.Popen(
                (*command, *self._arguments),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent
            )

    def new_worker(self) -> socket.socket:
        """Return a socket to a worker, which is ready once the tokenizer has been loaded.

        If loading fails, the other side closes the socket.
        """
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        # If the process has just ended, `theirs` is closed too, and the reader of `ours` sees it.
        with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return ours

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process. Workers end when their sockets are closed, or at their time limit."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
