"""Logs, dumps and counts defects in the memory records of a rank.

A setting decides if the engine then ends or goes on (`EngineCore`): this module owns
the record of the defect, never a request and never the memory itself.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_jax.mem_cache.dump import write_dump
from sgl_jax.mem_cache.errors import MemoryDefectError
from sgl_jax.mem_cache.rank_memory import RankMemory

logger = logging.getLogger(__name__)

# An engine that goes on after a defect may meet it again and again: this bounds the disk space.
MAX_DUMPS = 10


class DefectRecord:
    """Logs, dumps and counts the memory defects of one engine; dumps go to `folder`.

    Without a folder, a new temporary one that only this user can read is made for the first.
    """

    def __init__(self, folder: str | None) -> None:
        self.num_defects = 0
        self._folder = None if folder is None else Path(folder)

    def record(
        self, error: MemoryDefectError, memories: Sequence[RankMemory], context: dict[str, Any]
    ) -> str:
        """Take down a defect; answers in words where its dump is."""
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
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"memory-{os.getpid()}-{self.num_defects}.json"
            write_dump(path, memories, reason, context)
        except OSError as failure:
            return f"the memory dump could not be written: {failure}"
        return f"memory dump: {path}"
