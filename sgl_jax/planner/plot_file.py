"""Plots that commands write: a check of the file's name, and the import of matplotlib."""

from pathlib import Path

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot_file(path: Path) -> None:
    """Raise ValueError if no plot can be written to `path`; called before slow work begins."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot must end in one of {', '.join(PLOT_SUFFIXES)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {str(path.parent)!r}")


def figure_class() -> type:
    """Matplotlib's `Figure`. Raises RuntimeError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "--plot needs matplotlib: pip install 'sgl-jax[bench]' brings it"
        ) from error
    figure: type = Figure
    return figure
