"""Folders and files that other users of the machine cannot read, regardless of the umask.

Used for everything that holds prompts, histories, KV or recordings. The engine process sets a umask
that hides all its files; an `Engine` in Python does not change the umask of its process.
"""

import os
import stat
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Create `folder` and its missing parents for this user only. Raises OSError."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for this user only, as the `opener` of `open`. Raises OSError."""
    descriptor = os.open(path, flags, 0o600)
    if flags & os.O_TRUNC and stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)  # the file may have existed
    return descriptor
