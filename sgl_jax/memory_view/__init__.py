"""The memory view: snapshots of a scheduler's memory, frames made from them, and their page."""

from pathlib import Path

MEMORY_PAGE = Path(__file__).parent / "page"
