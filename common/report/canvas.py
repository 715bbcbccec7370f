"""What every picture shares: settings, colours, a grid of panels, a panel's frame, saving.

Drawn without pyplot and with fixed settings, so that a user's matplotlibrc and other figures of the process change
nothing, and the same runs give the same file. Colours are Okabe & Ito's, which colour-blind readers tell apart;
from the eighth line on, the dashes differ too.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.files import write_bytes
from common.report.curves import ACCURACY, label
from common.report.tables import is_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
GREY = "#555555"
STYLE: dict[str, Any] = {
    "figure.dpi": 150,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titley": 1.02,  # given, because finding a place for it costs as much as drawing
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "text.parse_math": False,  # a name may hold a dollar
    "legend.frameon": False,
}


def settings() -> Any:
    """A context with matplotlib's own defaults plus ours, whatever the user's matplotlibrc says."""
    import matplotlib

    defaults: dict[Any, Any] = dict(matplotlib.rcParamsDefault)
    return matplotlib.rc_context(defaults | STYLE | {"backend": "agg"})


def grid(panels: int, *, width: float, height: float, roomy: bool) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` panels of width x height inches, at most three in a row, and room for a title.

    roomy: make room for whatever stands around the panels, in twice the time; otherwise margins are fixed.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    across, down = width * columns, height * rows + (0.7 if roomy else 0.35)
    figure = Figure(figsize=(across, down))
    if roomy:
        figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    else:
        inside = {"wspace": 0.9 / (width - 0.9), "hspace": 0.85 / (height - 0.85)}
        figure.subplots_adjust(0.65 / across, 0.45 / down, 1 - 0.25 / across, 1 - 0.75 / down, **inside)
    axes = list(np.atleast_1d(figure.subplots(rows, columns)).ravel())
    for axis in axes[panels:]:
        axis.remove()
    return figure, axes[:panels]


def title(figure: Figure, text: str) -> None:
    """The figure's title, at the upper left."""
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold", fontsize=11)


def frame(axis: Axes, measure: str, x: str) -> None:
    """A panel's title, axis names and limits."""
    if measure.startswith(ACCURACY):
        axis.set_title(f"accuracy ({label(measure)})" if label(measure) else "accuracy")
        axis.set_ylabel("fraction right")
    else:
        axis.set_title(measure)
    axis.set_xlabel({"step": "updates", "time/elapsed": "seconds"}.get(x, x))
    if is_fraction(measure):
        axis.set_ylim(-0.02, 1.02)
    axis.margins(x=0.02)


def colour(index: int) -> str:
    """The colour of line `index`."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> Any:
    """The line style of line `index`."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG, atomically and without a time stamp."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})  # unlike savefig, draws once
    write_bytes(path, buffer.getvalue())
