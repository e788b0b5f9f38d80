"""What a run costs against clients, cohorts, records and parameters: time of a round, and peak memory, as a figure.

    python -m benchmarks.cost_curves --out benchmarks        a few minutes; writes cost_curves.json and cost_curves.png

Every point is a process of its own, so that its memory is its own: the peak of the run, beyond what Python, the libraries and
the records hold when it begins (on Linux, which can say so). One thread, one local step, private (Poisson batches, sigma 1),
and the epsilon once, at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from torch import nn

from benchmarks.cohort_step import processor
from dpfed import FedAvg, Gaussian, Recipe, Scaffold, Simulation, Task, iid
from dpfed.report import COLOURS, STYLE
from dpfed.rounds import begin


class Point(NamedTuple):
    """``width``: of a hidden layer; 0: none."""

    num_clients: int = 1000
    cohort: int = 100
    batch_size: int = 8
    width: int = 0
    algorithm: str = "FedAvg"
    records: int = 20

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.module().parameters())

    def module(self) -> nn.Module:
        if not self.width:
            return nn.Linear(20, 2)
        return nn.Sequential(nn.Linear(20, self.width), nn.Tanh(), nn.Linear(self.width, 2))


AXES: dict[str, dict[str, list[Point]]] = {
    "clients of the federation": {
        name: [Point(num_clients=n, algorithm=name) for n in (100, 1000, 10_000, 100_000)] for name in ("FedAvg", "Scaffold")
    },
    "clients of a cohort": {"FedAvg": [Point(num_clients=2000, cohort=n) for n in (10, 32, 100, 320, 1000)]},
    "records of a batch": {"FedAvg": [Point(cohort=10, batch_size=n, records=4 * n) for n in (4, 16, 64, 256, 1024)]},
    "parameters": {"FedAvg": [Point(cohort=10, width=n) for n in (0, 40, 400, 4000, 40_000)]},
}


def place(axis: str, point: Point) -> int:
    return {
        "clients of the federation": point.num_clients,
        "clients of a cohort": point.cohort,
        "records of a batch": point.batch_size,
        "parameters": point.num_parameters,
    }[axis]


def memory(field: str) -> float:
    """MiB of this process: VmRSS is what it holds, VmHWM the most that it held since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def cost(point: Point) -> dict[str, float]:
    """Of one point, in this process."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    num_records = point.records * point.num_clients
    x, y = torch.randn(num_records, 20, generator=random), torch.arange(num_records) % 2
    began = time.process_time()
    federation = iid((x, y), point.num_clients)
    dealt = time.process_time() - began
    algorithm: Any = {"FedAvg": FedAvg, "Scaffold": Scaffold}[point.algorithm]()
    mechanism = Gaussian(sigma=1.0, batch_size=point.batch_size)
    setting: dict[str, Any] = {"local_steps": 1, "schedule": "constant", "engine": Simulation(device="cpu")}
    setting |= {"rounds": 40, "evaluate_every": 40, "cohort": point.cohort}
    recipe = Recipe(Task(point.module(), federation), algorithm, mechanism, **setting)
    forget_peak()
    before = memory("VmRSS")
    with TemporaryDirectory() as folder:
        began = time.process_time()
        record, rows = begin(recipe, Path(folder) / "run")
        planned, times = time.process_time() - began, list[float]()
        for _ in range(recipe.rounds):
            began = time.process_time()
            next(rows)
            times.append(time.process_time() - began)
        list(rows)
        record.close()
    most = memory("VmHWM") - before
    return {"dealing": dealt, "planning": planned, "milliseconds": 1000 * median(times[2:]), "mebibytes": most}


def measured(point: Point) -> dict[str, float]:
    """In a process of its own."""
    words = [sys.executable, "-m", "benchmarks.cost_curves", "--point", json.dumps(point)]
    found = subprocess.run(words, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads(found.stdout.splitlines()[-1])


def line(costs: list[tuple[int, float]]) -> tuple[float, float]:
    """The straight line  a + b n  that is off by the smallest part of what was measured; neither is below zero."""
    places, values = torch.tensor(costs, dtype=torch.float64).unbind(1)
    terms = torch.stack([1 / values, places / values], dim=1)
    a, b = torch.linalg.lstsq(terms, torch.ones(len(costs), 1, dtype=torch.float64)).solution.flatten().tolist()
    if b < 0:
        return 1 / float((1 / values).mean()), 0.0
    return (a, b) if a > 0 else (0.0, 1 / float((places / values).mean()))


def in_words(a: float, b: float, most: int, unit: str, small: str, factor: int, one: str) -> str:
    """The line, where its slope shows: ``factor`` of the small unit are one of the other."""
    slope = b * factor
    return f"{a:.1f} {unit}" if b * most < a / 5 else f"{a:.1f} {unit} + {slope:.3g} {small} a {one}"


AXIS = {
    "clients of the federation": ("All clients", "client", "100 of them in a round"),
    "clients of a cohort": ("Clients in a round", "client", "out of 2,000"),
    "records of a batch": ("Records in a batch", "record", "of each of 10 clients"),
    "parameters": ("Parameters", "parameter", "10 clients, batches of 8"),
}


def draw(found: dict[str, Any], path: Path) -> None:
    """Points are measured, lines are straight (and bent only by the logarithmic axes)."""
    rows = ("milliseconds", "CPU time of a round", "ms", "µs", 1000), ("mebibytes", "Memory of the run", "MiB", "KiB", 1024)
    with rc_context(STYLE):
        page = Figure(figsize=(14, 6.6), layout="constrained")
        panels = page.subplots(2, len(found["axes"]), sharex="col", sharey="row")
        for (axis, curves), column in zip(found["axes"].items(), panels.T, strict=True):
            title, one, about = AXIS[axis]
            for axes, (what, _, *units) in zip(column, rows, strict=True):
                for (algorithm, points), colour in zip(curves.items(), COLOURS, strict=False):
                    costs = [(point["place"], point[what]) for point in points]
                    (first, _), (last, _) = costs[0], costs[-1]
                    a, b = line(costs)
                    places = np.geomspace(first, last, 100)
                    words = in_words(a, b, last, *units, one)
                    axes.plot(places, a + b * places, color=colour, linewidth=1.4, label=f"{algorithm}: {words}")
                    axes.plot(*zip(*costs, strict=True), "o", color=colour, markersize=5)
                axes.set(xscale="log", yscale="log", ylim=(1, 1000))
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
                axes.yaxis.set_major_formatter("{x:,.0f}")
                axes.legend(loc="upper left", fontsize=8.5, frameon=False, handlelength=1.2, borderaxespad=0.2)
            column[0].set_title(title)
            column[1].set_xlabel(f"{title.lower()}\n({about})")
        for axes, (_, name, unit, *_) in zip(panels[:, 0], rows, strict=True):
            axes.set_ylabel(f"{name}, {unit}")
        page.suptitle(
            "A constant, and so much for each more: straight lines, bent by the logarithmic axes.  "
            f"{found['machine']}; linear 20 → 2 but for the parameters; one private local step a round",
            fontsize=9.5,
        )
        page.savefig(path, dpi=150)


def main(out: Path = Path("benchmarks"), redraw: bool = False, point: str | None = None) -> None:
    """Measure, print and draw the curves.

    Args:
        out: a folder for cost_curves.json and cost_curves.png.
        redraw: only draw what cost_curves.json in that folder says.
        point: one point as JSON, measured in this process; the others are given to processes like that.
    """
    if point is not None:
        print(json.dumps(cost(Point(*json.loads(point)))))
        return
    if redraw:
        return draw(json.loads((out / "cost_curves.json").read_text()), out / "cost_curves.png")
    found: dict[str, Any] = {"machine": f"{processor()}, torch {torch.__version__}, one thread", "axes": {}}
    for axis, curves in AXES.items():
        print(f"\n| {axis:>26} | algorithm | ms a round | MiB | dealing s | planning s |\n|{'---:|---|' + '---:|' * 4}")
        for name, points in curves.items():
            for here in points:
                costs = measured(here) | {"place": place(axis, here)}
                found["axes"].setdefault(axis, {}).setdefault(name, []).append(costs)
                numbers = (
                    f"{costs['milliseconds']:.2f} | {costs['mebibytes']:.0f} | {costs['dealing']:.2f} | {costs['planning']:.2f}"
                )
                print(f"| {costs['place']:>26,} | {name} | {numbers} |", flush=True)
    (out / "cost_curves.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, out / "cost_curves.png")


if __name__ == "__main__":
    tyro.cli(main)
