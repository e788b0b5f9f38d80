"""Reports: every number in the table is in a record, and nothing in the figure covers anything else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text
from rich.text import Text as Cell

from dpfed import FashionMini, FedAvg, Plain, Recipe, run
from dpfed.__main__ import main
from dpfed.errors import InputError
from dpfed.record import RunRecord
from dpfed.report import STYLE, _apart, _page, figure, methods, table, table_text


@dataclass
class Made:
    """A run with made-up numbers."""

    recipe: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        accuracies = [row["accuracy"] for row in self.rows if row.get("accuracy") is not None]
        return {
            "name": self.recipe["name"],
            "final_accuracy": accuracies[-1] if accuracies else None,
            "best_accuracy": max(accuracies, default=None),
            "epsilon": self.rows[-1]["epsilon"] if self.rows else 0.0,
            "rounds": len(self.rows),
            "seconds": sum(row.get("seconds", 0) for row in self.rows),
            "bytes_up": None,
            "bytes_down": None,
        } | self.numbers


def made(name: str, top: float, epsilon: float = 2.0, seed: int = 0, num_rounds: int = 12, **settings: Any) -> Made:
    rows = [{"t": t, "epsilon": epsilon * (t + 1) / num_rounds, "seconds": 0.5} for t in range(num_rounds)]
    for row in rows[1::2]:  # every second round is evaluated
        row["accuracy"] = top * (row["t"] + 1) / num_rounds
    return Made({"name": name, "seed": seed, **settings}, rows)


def cells(*records: Any) -> list[list[Cell]]:
    grid = table(records)
    return [list(row) for row in zip(*(column._cells for column in grid.columns), strict=True)]


def words(*records: Any) -> list[list[str]]:
    return [[cell.plain for cell in row] for row in cells(*records)]


# The table


def test_one_run_is_one_line() -> None:
    run = made("DP-FedAdamW", 0.5)
    run.rows[3]["accuracy"] = 0.625
    run.numbers = {"bytes_up": 2_436_496.0, "bytes_down": 999.0}
    assert words(run) == [["DP-FedAdamW", "2.00", "50.0", "62.5", "1", "12", "2.4 MB", "999 B", "6.0"]]


def test_seeds_are_merged_to_mean_and_standard_deviation() -> None:
    finals = [0.5, 0.56, 0.59]
    runs = [made("DP-FedAvg", top, epsilon=2 + seed / 100, seed=seed) for seed, top in enumerate(finals)]
    ((name, epsilon, final, best, seeds, *_),) = words(*runs)
    expected = f"{100 * fmean(finals):.1f} ± {100 * stdev(finals):.1f}"
    assert (name, final, best, seeds) == ("DP-FedAvg", expected, expected, "3")
    assert epsilon == "2.02"  # the largest: what may be promised for each of them


def test_what_a_seed_changes_by_itself_does_not_part_the_seeds() -> None:
    runs = [made("A", 0.5, seed=seed, sigma=1 + seed, fingerprint=str(seed), engine={"device": "cpu"}) for seed in (0, 1)]
    runs[1].recipe["engine"] = {"device": "cuda"}
    assert [row[4] for row in words(*runs)] == ["2"]


def test_the_same_seed_twice_is_not_two_seeds() -> None:
    assert words(made("A", 0.5), made("A", 0.5))[0][2:5] == ["50.0", "50.0", "1"]


def test_runs_of_one_name_that_differ_are_not_merged_but_told_apart() -> None:
    runs = [made("A", 0.5, mechanism={"sigma": sigma, "clip": 1.0}, cohort=5) for sigma in (1.0, 2.0)]
    assert [row[0] for row in words(*runs, made("B", 0.4))] == ["A (sigma 1.0)", "A (sigma 2.0)", "B"]
    extra = made("A", 0.5, mechanism={"sigma": 1.0, "clip": 1.0}, cohort=5, momentum=0.9)
    assert [row[0] for row in words(runs[0], extra)] == ["A", "A (momentum 0.9)"]


def test_the_best_final_accuracy_is_bold_and_no_other() -> None:
    rows = cells(made("A", 0.5), made("B", 0.7), made("C", 0.6), Made({"name": "D", "seed": 0}))
    assert [{str(cell.style) for cell in row} for row in rows] == [{""}, {"bold"}, {""}, {""}]


def test_epsilon_is_rounded_upwards_and_infinity_is_said() -> None:
    assert [row[1] for row in words(made("A", 0.5, epsilon=1.98101), made("B", 0.5, epsilon=math.inf))] == ["1.99", "∞"]


def test_a_run_without_any_accuracy_still_has_its_line() -> None:
    assert words(Made({"name": "A", "seed": 0}))[0] == ["A", "0.00", "-", "-", "1", "0", "-", "-", "0.0"]


def test_the_text_is_plain_and_says_the_same() -> None:
    records = [made("DP-[bold]A[/bold]", 0.5), made("B", 0.7, epsilon=math.inf)]
    text = table_text(records)
    assert "\x1b" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())
    for row in words(*records):
        line = next(line for line in text.splitlines() if row[0] in line)
        assert [part for part in line.split() if part] == " ".join(row).split()


def test_no_run_no_report() -> None:
    for report in (table, table_text, methods):
        with pytest.raises(InputError, match="no run to report"):
            report([])


def test_a_record_on_disk_can_be_reported(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", {"name": "A", "seed": 3}, {}, 1e-5)
    record.append({"t": 0, "accuracy": 0.25, "epsilon": 0.0, "seconds": 1.0, "bytes_up": 8_000, "bytes_down": 8_000_000})
    assert words(RunRecord.open(tmp_path / "run")) == [["A", "0.00", "25.0", "25.0", "1", "1", "8 kB", "8 MB", "1.0"]]


def test_no_column_is_cut_off_in_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    run(Recipe(FashionMini(), FedAvg(), Plain(), rounds=1, local_steps=1, cohort=1), tmp_path / "run")
    main(["report", str(tmp_path / "run")])
    assert any(line.split()[-1:] == ["seconds"] for line in capsys.readouterr().out.splitlines())


# The figure


def page(*records: Any) -> Any:
    with matplotlib.rc_context(STYLE):
        drawn = _page(methods(records))
        drawn.draw_without_rendering()
    return drawn


def labels(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


CROWDS = {
    "two on one spot": [made("A", 0.5), made("B", 0.5)],
    "many": [made(f"DP-Method-{number}", 0.5 + number / 1000) for number in range(20)],
    "seeds": [made(name, top, seed=seed) for name, top in (("A", 0.5), ("B", 0.6)) for seed in (0, 1)],
    "budgets": [made("A", 0.4 + e / 100, epsilon=e, mechanism={"epsilon": e}) for e in (0.5, 2, 8)],
    "open": [made("A", 0.5), made("B", 0.6, epsilon=math.inf), made("C", 0.61, epsilon=math.inf)],
    "long": [made("A" * 60, 0.5), made("B" * 60, 0.5)],
}


@pytest.mark.parametrize("records", CROWDS.values(), ids=CROWDS)
def test_no_name_covers_another_or_leaves_the_page(records: list[Made]) -> None:
    drawn = page(*records)
    for axes in drawn.axes:
        boxes = [Text.get_window_extent(text) for text in axes.texts]
        assert len(boxes) == len(methods(records))
        assert not any(a.overlaps(b) for place, a in enumerate(boxes) for b in boxes[:place])
        assert all(box.x0 > axes.get_window_extent().x1 for box in boxes)
    left, right = drawn.axes
    assert all(Text.get_window_extent(text).x1 < right.get_window_extent().x0 for text in left.texts)
    assert all(Text.get_window_extent(text).x1 < drawn.bbox.x1 for text in right.texts)


def test_the_names_stand_in_the_order_of_the_lines() -> None:
    left, _ = page(*(made(name, top) for name, top in (("A", 0.500), ("B", 0.503), ("C", 0.501), ("D", 0.9)))).axes
    heights = {text.get_text()[0]: Text.get_window_extent(text).y0 for text in left.texts}
    assert sorted(heights, key=heights.__getitem__) == ["A", "C", "B", "D"]


def test_the_lines_are_the_numbers_of_the_rows() -> None:
    left, right = page(*(made("A", top, seed=seed) for seed, top in enumerate((0.4, 0.6)))).axes
    line = left.lines[0]
    assert list(line.get_xdata()) == [2, 4, 6, 8, 10, 12]  # rounds are counted from one
    assert list(line.get_ydata()) == pytest.approx([50 * t / 12 for t in (2, 4, 6, 8, 10, 12)])
    assert list(right.lines[0].get_xdata()) == pytest.approx([2 * t / 12 for t in (2, 4, 6, 8, 10, 12)])
    band = left.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == pytest.approx((50 / 6 - 100 * stdev((0.4, 0.6)) / 6, 50 + 100 * stdev((0.4, 0.6))), abs=9)
    assert labels(left) == labels(right) == ["A  50.0"]


def test_runs_without_privacy_are_a_dashed_level_in_the_second_panel() -> None:
    _, right = page(made("DP-A", 0.5), made("A", 0.6, epsilon=math.inf)).axes
    level = right.lines[-1]
    assert list(level.get_ydata()) == pytest.approx([60, 60])
    assert level.is_dashed()
    assert labels(right) == ["DP-A  50.0", "without privacy  60.0"]
    assert right.get_xlim()[1] < 3
    _, right = page(made("A", 0.6, epsilon=math.inf), made("B", 0.5, epsilon=math.inf)).axes
    assert labels(right) == ["A without privacy  60.0", "B without privacy  50.0"]


def test_the_epsilons_are_logarithmic_when_the_budgets_are_far_apart() -> None:
    def scale(*budgets: float) -> str:
        return page(*(made(f"A{budget}", 0.5, epsilon=budget) for budget in budgets)).axes[1].get_xscale()

    assert (scale(1, 3), scale(1, 8), scale(2), scale(0.5, math.inf)) == ("linear", "log", "linear", "linear")


STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", STARTS)
def test_the_same_records_give_the_same_file(tmp_path: Path, suffix: str) -> None:
    records = [made("DP-A", 0.5), made("A", 0.6, epsilon=math.inf), Made({"name": "not evaluated yet", "seed": 0})]
    first, second = (figure(records, tmp_path / f"{name}{suffix}").read_bytes() for name in "ab")
    assert first == second
    assert first.startswith(STARTS[suffix])


def test_a_name_with_dollars_is_not_a_formula(tmp_path: Path) -> None:
    assert figure([made("A$\\frac{$", 0.5)], tmp_path / "a.png").exists()


def test_figures_that_cannot_be_drawn_say_why(tmp_path: Path) -> None:
    run = made("A", 0.5)
    with pytest.raises(InputError, match=r"ends in \.png, \.svg, \.pdf, got 'a\.gif'"):
        figure([run], tmp_path / "a.gif")
    with pytest.raises(InputError, match="no run has an accuracy"):
        figure([Made({"name": "A", "seed": 0})], tmp_path / "a.png")
    with pytest.raises(InputError, match=rf"{tmp_path}/none/a\.png: cannot be written"):
        figure([run], tmp_path / "none" / "a.png")


@given(
    wanted=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    gap=st.floats(0, 0.09),
)
def test_names_are_moved_apart_as_little_as_can_be(wanted: list[float], gap: float) -> None:
    places = _apart(wanted, gap)
    assert len(places) == len(wanted)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    ordered = sorted(places)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(ordered))
    by_wish = [places[index] for index in sorted(range(len(wanted)), key=wanted.__getitem__)]
    assert by_wish == ordered
    wishes = sorted(wanted)
    if all(b - a > gap + 1e-9 for a, b in pairwise(wishes)):
        assert places == pytest.approx(wanted)
    shift = sum(places) - sum(wanted)  # only the edges can push everything to one side
    assert abs(shift) < 1e-6 or min(places) < 1e-9 or max(places) > 1 - 1e-9
