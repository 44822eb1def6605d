"""What can happen to a process from outside: ended, stopped, slowed, out of memory or files."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

MIB = 2**20
STOPPED_S = 1.0  # less than the heartbeat's time-out there
Fault = Callable[[psutil.Process], None]


def kill(process: psutil.Process) -> None:
    process.kill()


def stop(process: psutil.Process) -> None:
    process.suspend()


def pause(process: psutil.Process) -> None:
    """Stop it for a while."""
    process.suspend()
    time.sleep(STOPPED_S)
    process.resume()


def slow(process: psutil.Process) -> None:
    """Let it run half of the time, for a while."""
    for _ in range(10):
        process.suspend()
        time.sleep(0.1)
        process.resume()
        time.sleep(0.1)


def no_memory(process: psutil.Process) -> None:
    """It gets hardly any more address space than it has."""
    most = process.memory_info().vms + 4 * MIB
    process.rlimit(psutil.RLIMIT_AS, (most, most))


def no_files(process: psutil.Process) -> None:
    """It can open no more files, sockets included."""
    num_fds = process.num_fds()  # once: it opens and closes some
    process.rlimit(psutil.RLIMIT_NOFILE, (num_fds, num_fds))


def no_disk(process: psutil.Process) -> None:
    """No file that it writes can grow any more: each write fails as on a full disk."""
    process.rlimit(psutil.RLIMIT_FSIZE, (0, 0))


FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault for fault in (kill, stop, pause, slow, no_memory, no_files, no_disk)
}


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended, a corpse that was not looked at included."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def sockets_in(folder: Path) -> list[str]:
    """Sockets and folders of sockets that lie in `folder`."""
    return sorted(path.name for path in folder.rglob("*") if path.is_socket() or path.is_dir())
