"""The memory view: snapshots of a scheduler's memory, the frames made of them, and their page."""

from pathlib import Path

MEMORY_PAGE = Path(__file__).parent / "page"
