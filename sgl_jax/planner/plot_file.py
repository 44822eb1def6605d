"""Plots written by commands: check the file name, import matplotlib, finish and save the figure."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot_file(path: Path) -> None:
    """Raise ValueError if no plot can be written to `path`; call before slow work begins."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot must end in one of {', '.join(PLOT_SUFFIXES)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {str(path.parent)!r}")


def add_grids_and_legends(panels: Iterable[Any]) -> None:
    """Give each panel (matplotlib's Axes) a light grid, and a legend to its right."""
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure reproducibly: equal figures give equal files, so an SVG has no date."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def figure_class() -> type:
    """Return matplotlib's `Figure`. Raises RuntimeError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "--plot needs matplotlib: pip install 'sgl-jax[bench]' brings it"
        ) from error
    figure: type = Figure
    return figure
