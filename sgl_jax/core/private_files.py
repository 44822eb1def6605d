"""Folders and files that other users of the machine cannot read, whatever the umask is.

They are for all that holds prompts, histories, KV or recordings. The process of the engine has
a umask that closes all its files; an `Engine` in Python does not change the umask of its process.
"""

import os
import stat
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Make `folder` and its parents, as far as they do not exist, for this user only.

    Raises OSError if one cannot be made.
    """
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for this user only; the `opener` of `open`. Raises OSError."""
    descriptor = os.open(path, flags, 0o600)
    if flags & os.O_TRUNC and stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)  # it may have existed
    return descriptor
