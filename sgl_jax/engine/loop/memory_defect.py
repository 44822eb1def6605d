"""Logs, dumps and counts defects in the memory records of a rank.

`EngineCore` then ends or continues, by a setting. This module changes no requests and no memory.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_jax.core.private_files import make_private_folder
from sgl_jax.mem_cache.dump import write_dump
from sgl_jax.mem_cache.errors import MemoryDefectError
from sgl_jax.mem_cache.rank_memory import RankMemory

logger = logging.getLogger(__name__)

# Bounds the disk space: an engine that continues after a defect may find it repeatedly.
MAX_DUMPS = 10


class DefectRecord:
    """The record of one engine's memory defects.

    Dumps go to `folder`, or if it is None, to a new temporary folder readable only by this user.
    """

    def __init__(self, folder: str | None) -> None:
        self.num_defects = 0
        self._folder = None if folder is None else Path(folder)

    def record(
        self, error: MemoryDefectError, memories: Sequence[RankMemory], context: dict[str, Any]
    ) -> str:
        """Log, dump and count a defect, and return a phrase with the path of the dump."""
        self.num_defects += 1
        where = self._dump(str(error), memories, context)
        logger.critical(
            "the records of the memory are wrong; %s; %s: %s",
            where,
            type(error).__name__,
            error,
            exc_info=error,
        )
        return where

    def _dump(self, reason: str, memories: Sequence[RankMemory], context: dict[str, Any]) -> str:
        if self.num_defects > MAX_DUMPS:
            return f"no memory dump: {MAX_DUMPS} were written already"
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="sgl-jax-memory-"))
            make_private_folder(self._folder)
            path = self._folder / f"memory-{os.getpid()}-{self.num_defects}.json"
            write_dump(path, memories, reason, context)
        except OSError as failure:
            return f"the memory dump could not be written: {failure}"
        return f"memory dump: {path}"
