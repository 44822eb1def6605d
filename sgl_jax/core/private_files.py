"""Folders and files that other users of the machine cannot read, regardless of the umask.

Used for caches, and for everything that holds prompts, histories, KV or recordings. The engine
process sets a umask that hides all its files; an `Engine` in Python does not change the umask of
its process.
"""

import os
import stat
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Create `folder` and its missing parents for this user only. Raises OSError."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def user_cache_folder(name: str) -> Path:
    """Return the folder `name` of this package in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base, "sgl_jax", name).expanduser()


def check_private_folder(folder: Path) -> None:
    """Raise PermissionError if another user owns the folder or can write to it."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} must belong to this user and not be writable by others")


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for this user only, as the `opener` of `open`. Raises OSError."""
    descriptor = os.open(path, flags, 0o600)
    if flags & os.O_TRUNC and stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)  # the file may have existed
    return descriptor
