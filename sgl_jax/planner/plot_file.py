"""Pictures that commands write: which files they may be, and the library that draws them."""

from pathlib import Path

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot_file(path: Path) -> None:
    """Raise ValueError, before anything slow is begun, if a picture could not be written there."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot must end in one of {', '.join(PLOT_SUFFIXES)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {str(path.parent)!r}")


def figure_class() -> type:
    """Matplotlib's `Figure`. Raises RuntimeError where there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            "--plot needs matplotlib: pip install 'sgl-jax[bench]' brings it"
        ) from error
    figure: type = Figure
    return figure
