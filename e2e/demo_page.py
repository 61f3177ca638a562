"""build/demo.html: the demonstration's series as plots, its figures and what the operator decided."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from demo import Outcome, Prediction, Sample

TEMPLATE: Final = "demo.html.j2"

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db5", "#d9822b", "#3b8f5a", "#c4413b", "#9aa4b2"
STYLE: Final[dict[Any, Any]] = {
    # Text stays text: the browser's font, selectable, and half the size.
    "svg.fonttype": "none",
    "svg.hashsalt": "demo",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": "#c9d1dc",
    "axes.labelcolor": "#4a5566",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e8ecf2",
    "xtick.color": "#4a5566",
    "ytick.color": "#4a5566",
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def values(samples: Sequence[Sample], pick: Callable[[Sample], float | None]) -> list[float]:
    """A series with gaps where nothing is known."""
    return [math.nan if (value := pick(sample)) is None else float(value) for sample in samples]


def plots(outcome: Outcome) -> str:
    """Five plots over one time axis, as an SVG element."""
    with mpl.rc_context(STYLE):
        figure = draw(outcome)
        text = io.StringIO()
        blank = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", metadata=blank, bbox_inches="tight", pad_inches=0.05)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def draw(outcome: Outcome) -> Figure:
    """The figure; the phases are shaded."""
    samples = outcome.samples
    at = [sample.at_s for sample in samples]
    figure = Figure(figsize=(9.6, 10.4))
    rates, waiting, replicas, memory, latency = figure.subplots(
        5, 1, sharex=True, gridspec_kw={"hspace": 0.28, "height_ratios": [1.2, 1.0, 1.2, 0.8, 1.0]}
    )

    rates.plot(at, values(samples, lambda s: s.arrivals), color=BLUE, label="arrivals")
    rates.plot(at, values(samples, lambda s: s.answered), color=GREEN, label="answers")
    rates.axhline(outcome.capacity, color=GREY, linestyle="--", linewidth=1, label="what one replica serves")
    rates.set_title("Requests per second", loc="left", fontweight="bold")

    series = values(samples, lambda s: s.waiting)
    waiting.fill_between(at, series, color=ORANGE, alpha=0.25, linewidth=0)
    waiting.plot(at, series, color=ORANGE, label="waiting in Triton")
    waiting.set_title("Waiting requests", loc="left", fontweight="bold")

    ready = values(samples, lambda s: s.ready)
    replicas.fill_between(at, ready, step="post", color=GREEN, alpha=0.25, linewidth=0)
    replicas.step(at, ready, where="post", color=GREEN, label="ready")
    replicas.step(at, values(samples, lambda s: s.wanted), where="post", color=BLUE, linestyle="--", label="ordered")
    most = max((max(s.ready or 0, s.wanted or 0) for s in samples), default=1)
    replicas.set_yticks(range(most + 1))
    replicas.set_title("Replicas", loc="left", fontweight="bold")

    used = values(samples, lambda s: None if s.memory_mib is None else s.memory_mib / 1024)
    memory.step(at, used, where="post", color=BLUE, label="held by all replicas (made-up GPUs)")
    memory.set_title("GPU memory, GiB", loc="left", fontweight="bold")

    latency.plot(at, values(samples, lambda s: s.p99_s), color=RED, label="p99 of 5 s, from when a request was due")
    latency.plot(at, values(samples, lambda s: s.p50_s), color=BLUE, label="p50")
    latency.set_title("Latency, seconds", loc="left", fontweight="bold")
    latency.set_xlabel("seconds since the load began")

    end = at[-1] if at else 1.0
    starts = [*(start for _, start in outcome.phases), end]
    for axes in (rates, waiting, replicas, memory, latency):
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3, fontsize=9, borderaxespad=0)
        for index in range(1, len(outcome.phases), 2):
            axes.axvspan(starts[index], starts[index + 1], color=ORANGE, alpha=0.06, linewidth=0)
    for name, start in outcome.phases:
        place = {"xytext": (3, 0), "textcoords": "offset points", "color": "#4a5566", "fontsize": 9}
        waiting.annotate(name, (start, 0.88), xycoords=("data", "axes fraction"), **place)
    return figure


def right(prediction: Prediction) -> str:
    """A mark for a prediction that could be checked."""
    if prediction.expected is None:
        return ""
    return "✓" if prediction.label == prediction.expected else f"expected {prediction.expected}"


def cards(figures: dict[str, Any], outcome: Outcome) -> list[tuple[str, str]]:
    """The large figures: value and what it is."""

    def shown(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{value:.0f}{unit}"

    def latency(value: float | None) -> str:
        return shown(None if value is None else 1000 * value, " ms") if (value or 0) < 1 else shown(value, " s")

    return [
        (f"{figures['failed']} of {figures['requests']}", "requests failed"),
        (" → ".join(map(str, outcome.wanted_path)), "replicas ordered"),
        (shown(figures["ready_after_s"], " s"), "from apply to Ready"),
        (shown(figures["step_to_order_s"], " s"), "from the step to the order"),
        (shown(figures["step_to_second_ready_s"], " s"), "from the step to the second replica"),
        (latency(figures["p50_s"]), "median latency"),
        (shown(figures["most_waiting"], ""), "most requests waiting"),
        (shown(figures["gone_after_s"], " s"), "from deletion to nothing left"),
    ]


def render(outcome: Outcome) -> str:
    """The page, without anything from elsewhere."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figures = outcome.summary()
    return environment.get_template(TEMPLATE).render(
        outcome=outcome,
        figures=figures,
        cards=cards(figures, outcome),
        predictions=[(each, right(each)) for each in outcome.predictions],
        # matplotlib escapes what it writes, and nothing of a custom resource is in it
        plots=Markup(plots(outcome)),  # noqa: S704
    )


def write(path: Path, outcome: Outcome) -> None:
    """Write the page, and its folder when there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(outcome))
