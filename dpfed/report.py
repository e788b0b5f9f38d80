"""Run records side by side, as a table and as a figure. Every number is read from records, none is typed by hand."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from textwrap import dedent
from typing import Any, Protocol, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpfed.errors import InputError

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#AA4499",
    "#E69F00",
    "#56B4E9",
    "#332288",
)  # colour-blind eyes tell them apart
INK, MUTED, GRID = "#1F2933", "#616E7C", "#E4E7EB"
DASHED: dict[str, Any] = {"dashes": (4, 3), "linewidth": 1.5}
LABELS = 1.06  # where the names begin, in widths of a panel
METADATA: dict[str, dict[str, Any]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}  # no clock in a file
FURTHER = {"macro_accuracy": "macro", "f1": "F1", "matthews": "Matthews", "worst_client_accuracy": "worst client"}
PER_SEED = {"seed", "sigma", "fingerprint", "engine"}  # what may differ between the seeds of one method
STYLE = {
    **{
        "font.size": 10,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 12,
    },
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "ytick.major.size": 0},
    **{"text.color": INK, "axes.titlecolor": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED},
    **{"axes.edgecolor": MUTED, "lines.linewidth": 2, "lines.solid_capstyle": "round", "savefig.dpi": 200},
    "svg.hashsalt": "dpfed",
}


class Run(Protocol):
    """What a report reads of a `dpfed.record.RunRecord`."""

    @property
    def recipe(self) -> Mapping[str, Any]: ...
    @property
    def rows(self) -> Sequence[Mapping[str, Any]]: ...
    def summary(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Method:
    """The runs of one recipe under several seeds."""

    name: str
    runs: list[Run]
    summaries: list[Mapping[str, Any]]

    def column(self, key: str) -> list[float]:
        return [summary[key] for summary in self.summaries if summary.get(key) is not None]

    def finals(self, key: str) -> list[float]:
        """The last value in the rows of every run that has one."""
        values = [[row[key] for row in run.rows if row.get(key) is not None] for run in self.runs]
        return [column[-1] for column in values if column]

    @property
    def epsilon(self) -> float:
        """The largest of the seeds': what may be promised for each of them."""
        return max(self.column("epsilon"))

    def curve(self, key: str) -> list[tuple[float, float, float]]:
        """Mean `key`, mean accuracy in percent and its sd, at every round where all seeds have both."""
        wanted = (key, "accuracy")
        seeds = [{row["t"]: row for row in run.rows if None not in map(row.get, wanted)} for run in self.runs]
        rounds = [[seed[t] for seed in seeds] for t in sorted(set(seeds[0]).intersection(*seeds))]
        return [(fmean(row[key] for row in rows), *_mean([100 * row["accuracy"] for row in rows])) for rows in rounds]


def methods(records: Iterable[Run]) -> list[Method]:
    """Runs that differ in nothing but the seed are one method; those of one name are told apart by what does differ."""
    groups: dict[str, dict[Any, Run]] = {}
    for record in records:
        recipe = {key: value for key, value in record.recipe.items() if key not in PER_SEED}
        groups.setdefault(json.dumps(recipe, sort_keys=True), {})[record.recipe.get("seed")] = record
    if not groups:
        raise InputError("records: there is no run to report. Give at least one.")
    found: list[Method] = []
    settings = [_settings(json.loads(group)) for group in groups]
    for mine, seeds in zip(settings, groups.values(), strict=True):
        rivals = [other for other in settings if other["name"] == mine["name"]]
        telling = {key: value for key, value in mine.items() if any(other.get(key) != value for other in rivals)}
        words = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in telling.items())
        name = f"{mine['name']} ({words})" if words else str(mine["name"])
        found.append(Method(name, list(seeds.values()), [run.summary() for run in seeds.values()]))
    return found


def table(records: Iterable[Run]) -> Table:
    """One line a method; seeds are merged to mean ± standard deviation. The best final accuracy is bold."""
    found = methods(records)
    finals = [method.column("final_accuracy") for method in found]
    best = max((fmean(final) for final in finals if final), default=None)
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold", caption_justify="left")
    result.caption = "ε by PLD; accuracy and its like in percent; up, down: bytes per client and round"
    result.add_column("method", min_width=min(24, max(len(method.name) for method in found)))
    further = {heading: key for key, heading in FURTHER.items() if any(method.finals(key) for method in found)}
    for heading in ("ε", "accuracy", "best", *further, "seeds", "rounds", "up", "down", "seconds"):
        result.add_column(heading, justify="right", no_wrap=True)
    for method, final in zip(found, finals, strict=True):
        style = "bold" if final and fmean(final) == best else ""
        cells = [
            "∞" if math.isinf(method.epsilon) else f"{math.ceil(method.epsilon * 100) / 100:.2f}",  # upwards
            _spread(final),
            _spread(method.column("best_accuracy")),
            *(_spread(method.finals(key)) for key in further.values()),
            str(len(method.runs)),
            f"{max(method.column('rounds')):.0f}",
            _bytes(method.column("bytes_up")),
            _bytes(method.column("bytes_down")),
            f"{fmean(method.column('seconds')):,.1f}",
        ]
        result.add_row(Text(method.name, style), *(Text(cell, style) for cell in cells))
    return result


def table_text(records: Iterable[Run]) -> str:
    """The table as plain text, for a terminal, a README or a log."""
    page = Console(file=io.StringIO(), width=160, color_system=None, legacy_windows=False)
    page.print(table(records))
    lines = cast(io.StringIO, page.file).getvalue().splitlines()
    return dedent("\n".join(line.rstrip() for line in lines if line.strip()))


def figure(records: Iterable[Run], path: str | Path) -> Path:
    """Accuracy over the rounds, and for the epsilon spent so far: two panels in one PNG, SVG or PDF."""
    path, found = Path(path), [method for method in methods(records) if method.curve("t")]
    if path.suffix not in METADATA:
        raise InputError(f"figure: ends in {', '.join(METADATA)}, got {path.name!r}. Change the ending.")
    if not found:
        raise InputError("figure: no run has an accuracy in its rows yet. Wait for the first round that is evaluated.")
    with import_module("matplotlib").rc_context(STYLE):
        page = _page(found)
        try:
            page.savefig(path, metadata=METADATA[path.suffix])
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}). Name another place for it.") from error
    return path


def _page(found: Sequence[Method]) -> Any:
    drawing, ticks = import_module("matplotlib.figure"), import_module("matplotlib.ticker")
    private = [method for method in found if math.isfinite(method.epsilon)]
    budgets = [method.epsilon for method in private if method.epsilon > 0]
    page = drawing.Figure(figsize=(11, max(4.2, 1.6 + 0.25 * len(found))))
    left, right = panels = page.subplots(1, 2, sharey=True)
    for method in found:
        colour = COLOURS[private.index(method) % len(COLOURS)] if method in private else MUTED
        exposed = "without privacy" if len(found) == len(private) + 1 else f"{method.name} without privacy"
        _draw(left, method, "t", colour, method.name)
        _draw(right, method, "epsilon", colour, method.name if method in private else exposed)
    left.set(title="Accuracy over the rounds", xlabel="rounds", xlim=(0, None))
    left.xaxis.set_major_locator(ticks.MaxNLocator(6, integer=True))
    left.yaxis.set_major_formatter(ticks.PercentFormatter(decimals=0))
    right.set(title="Accuracy for the privacy spent", xlabel="ε spent so far")
    if not private:
        right.set(xticks=(), xlabel="no run with a finite ε")
    elif budgets and max(budgets) > 5 * min(budgets):
        right.set_xscale("log")
        right.xaxis.set_major_formatter("{x:g}")
    else:
        right.set_xlim(0, None)
    _label_ends(page, panels)
    return page


def _draw(axes: Any, method: Method, key: str, colour: str, label: str) -> None:
    """One method: a line, a band of one standard deviation, a dot and a name at its end. Without privacy: dashed."""
    endless = math.isinf(method.epsilon)
    curve = method.curve("t" if endless else key)
    if not curve:
        return
    x, mean, low, high = zip(*((at + (key == "t"), m, m - sd, m + sd) for at, m, sd in curve), strict=True)
    end, frame, look = x[-1], axes.transData, {"color": colour, **(DASHED if endless else {})}
    if endless and key == "epsilon":
        end, frame = 1, axes.get_yaxis_transform()
        axes.axhline(mean[-1], **look)
    else:
        axes.plot(x, mean, **look)
        axes.plot(end, mean[-1], "o", color=colour, markersize=6, markeredgecolor="white", zorder=3)
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    link = {"arrowstyle": "-", "color": colour, "linestyle": ":", "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 4}
    place = {"xycoords": frame, "textcoords": axes.transAxes, "annotation_clip": False, "va": "center"}
    text = axes.annotate(f"{label}  {mean[-1]:.1f}", (end, mean[-1]), (LABELS, 0), arrowprops=link, **place)
    text.set(color=colour, fontsize=9.5, parse_math=False)


def _label_ends(page: Any, panels: Sequence[Any]) -> None:
    """Give the names a column right of each panel, and move them up or down until none covers another."""
    words = import_module("matplotlib.text").Text
    page.draw_without_rendering()  # settles the limits of the axes and the sizes of the words
    sizes = [[words.get_window_extent(name) for name in axes.texts] for axes in panels]
    panel, names = 3.6, max(size.width for column in sizes for size in column) / page.dpi  # widths in inches
    wide, tall = 1.15 + 2 * (LABELS * panel + names), page.get_size_inches()[1]
    page.set_size_inches(wide, tall)
    for number, (axes, column) in enumerate(zip(panels, sizes, strict=True)):
        start = 0.6 + number * (LABELS * panel + names + 0.45)
        axes.set_position((start / wide, 0.6 / tall, panel / wide, 1 - 1.15 / tall))
        ends = [axes.transAxes.inverted().transform(name.xycoords.transform(name.xy))[1] for name in axes.texts]
        step = 1.25 * max((size.height for size in column), default=0) / axes.get_window_extent().height
        for name, height in zip(axes.texts, _apart(ends, step), strict=True):
            name.set_position((LABELS, height))


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """The places nearest to those wanted that lie at least `gap` apart and between 0 and 1."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    pools: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        mean, count = wanted[index] - rank * gap, 1
        while pools and pools[-1][0] >= mean:
            below, more = pools.pop()
            mean, count = (below * more + mean * count) / (more + count), more + count
        pools.append((mean, count))
    room = max(1 - gap * (len(wanted) - 1), 0)
    places = [min(max(mean, 0), room) for mean, count in pools for _ in range(count)]
    return [places[rank] + rank * gap for _, rank in sorted((index, rank) for rank, index in enumerate(order))]


def _settings(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            flat |= _settings(cast(dict[str, Any], value), f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _mean(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def _spread(shares: Sequence[float]) -> str:
    if not shares:
        return "-"
    mean, sd = _mean([100 * share for share in shares])
    return f"{mean:.1f} ± {sd:.1f}" if len(shares) > 1 else f"{mean:.1f}"


def _bytes(counts: Sequence[float]) -> str:
    if not counts:
        return "-"
    power = min(int(math.log10(max(fmean(counts), 1)) // 3), 4)
    return f"{fmean(counts) / 1000**power:.1f}".removesuffix(".0") + f" {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
