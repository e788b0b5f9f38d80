"""Metrics equal scikit-learn's on the same predictions, and the test is judged without waiting for its batches."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpfed import FedAvg, Federation, FlatModel, InputError, Plain, Recipe, RunRecord, Task, iid, run
from dpfed.__main__ import main
from dpfed.metrics import METRICS, client_accuracies, confusion
from dpfed.tasks.text import GLUE

sklearn = pytest.importorskip("sklearn.metrics")

REFEREES: dict[str, Any] = {
    "accuracy": sklearn.accuracy_score,
    "macro_accuracy": sklearn.balanced_accuracy_score,
    "f1": lambda y, said: sklearn.f1_score(y, said, zero_division=0.0),
    "matthews": sklearn.matthews_corrcoef,
}


def predictions(num_classes: int, seed: int, num: int = 500) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    target = torch.randint(num_classes, (num,), generator=random)
    noise = torch.randint(num_classes, (num,), generator=random)
    return target, torch.where(torch.rand(num, generator=random) < 0.6, target, noise)


@pytest.mark.parametrize(
    ("name", "num_classes"), [(name, n) for name in METRICS for n in (2, 3, 20) if (name, n > 2) != ("f1", True)]
)
@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_scikit_learn(name: str, num_classes: int, seed: int) -> None:
    target, said = predictions(num_classes, seed)
    expected = REFEREES[name](target.numpy(), said.numpy())
    assert METRICS[name](confusion(target, said, num_classes)).item() == pytest.approx(expected, abs=1e-12)


CONSTANT = [([0, 1, 1], [1, 1, 1]), ([0, 1, 1], [0, 0, 0]), ([0, 0, 0], [0, 0, 0]), ([1, 1], [0, 0]), ([0, 1, 0], [1, 0, 1])]


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(("target", "said"), CONSTANT)
def test_where_there_is_nothing_to_divide_by(name: str, target: list[int], said: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's, about exactly this
        expected = REFEREES[name](target, said)
    assert METRICS[name](confusion(torch.tensor(target), torch.tensor(said), 2)).item() == pytest.approx(expected)


def test_glue_is_judged_as_glue_is() -> None:
    metrics = {task: GLUE[task].metrics for task in GLUE}
    assert metrics == {
        "cola": ("matthews", "accuracy"),
        "mnli": ("accuracy",),
        "mrpc": ("f1", "accuracy"),
        "qnli": ("accuracy",),
        "qqp": ("f1", "accuracy"),
        "rte": ("accuracy",),
        "sst2": ("accuracy",),
    }


def test_client_accuracies_count_each_share_alone() -> None:
    right = torch.tensor([True, False, True, True, False])
    shares = (torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([], dtype=torch.long), torch.tensor([4, 0, 2]))
    found = client_accuracies(right, shares)
    assert found[[0, 1, 3]].tolist() == pytest.approx([0.5, 1.0, 2 / 3])
    assert found[2].isnan()


X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
EVERYTHING = ("accuracy", "macro_accuracy", "matthews", "worst_client_accuracy", "client_accuracy")


@pytest.mark.parametrize("at_once", [7, 60, 1000])
def test_evaluate_is_the_mean_over_records_however_they_are_batched(at_once: int) -> None:
    module = nn.Linear(4, 3)
    model = FlatModel(module, metrics=EVERYTHING)
    shares = (torch.arange(0, 20), torch.arange(20, 60))
    found = model.evaluate(model.theta0(), {"x": X, "y": Y}, shares, at_once=at_once)
    with torch.no_grad():
        scores = module(X)
    right = (scores.argmax(1) == Y).double()
    assert set(found) == {"loss", *EVERYTHING}
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(scores, Y).item(), abs=1e-6)
    assert found["accuracy"] == pytest.approx(right.mean().item())
    assert found["client_accuracy"] == pytest.approx([right[:20].mean().item(), right[20:].mean().item()])
    assert found["worst_client_accuracy"] == min(found["client_accuracy"])


def test_the_test_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads a number off the device (item, tolist, bool, float) is called only when all batches are under way."""
    model, read = FlatModel(nn.Linear(4, 3), metrics=EVERYTHING[:3]), list[str]()
    theta = model.theta0()
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, _f=original, _n=name: (read.append(_n), _f(self))[1])
    model.evaluate(theta, {"x": X, "y": Y}, at_once=5)
    assert read == ["tolist"] * 4, "loss and three metrics, after twelve batches"


def task(metrics: tuple[str, ...], federation: Federation | None = None, outputs: int = 3) -> Recipe:
    federation = federation or iid((X, Y), 3, test=(X[:30], Y[:30]))
    work = Task(nn.Linear(4, outputs), federation, metrics=metrics)
    return Recipe(work, FedAvg(lr=0.1), Plain(batch_size=8), rounds=2, local_steps=1, cohort=2)


def test_rows_have_the_metrics_that_the_task_names(tmp_path: Path) -> None:
    federation = iid((X, Y), 3, test=(X[:30], Y[:30])).deal_test()
    record = run(task(("accuracy", "worst_client_accuracy", "client_accuracy"), federation), tmp_path / "run")
    again = RunRecord.open(tmp_path / "run")
    for row in again.rows:
        assert row["worst_client_accuracy"] == min(row["client_accuracy"]) <= row["accuracy"]
        assert len(row["client_accuracy"]) == 3
    assert again.rows == record.rows
    assert record.summary()["final_accuracy"] == record.rows[-1]["accuracy"], "the last one, not the best"
    table = record.table().splitlines()
    assert table[0].split()[:6] == ["method", "ε", "accuracy", "best", "worst", "client"]
    assert f" {100 * record.rows[-1]['worst_client_accuracy']:.1f} " in table[2]
    cheap = run(replace(task(("accuracy",), federation)), tmp_path / "cheap")
    assert "worst" not in cheap.table()
    assert not {"macro_accuracy", "worst_client_accuracy", "client_accuracy", "f1"} & set(cheap.rows[-1])


def test_the_command_line_names_metrics_and_a_resumed_run_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--rounds", "2", "--local-steps", "1", "--cohort", "2", "--engine.device", "cpu", "--out", str(tmp_path / "run")]
    main(["run", "fashion/FedAvg", *short, "--task.metrics", "accuracy", "macro_accuracy", "worst_client_accuracy"])
    rows = RunRecord.open(tmp_path / "run").rows
    assert 0 <= rows[-1]["worst_client_accuracy"] < rows[-1]["macro_accuracy"]
    assert "worst client" in capsys.readouterr().out
    for file in ("model.safetensors", "checkpoint.safetensors"):
        (tmp_path / "run" / file).unlink()
    main(["resume", str(tmp_path / "run")])
    again = RunRecord.open(tmp_path / "run").rows
    assert [row | {"seconds": 0} for row in again] == [row | {"seconds": 0} for row in rows]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (lambda: task(("acuracy",)), ["metrics", "acuracy", "macro_accuracy"]),
        (lambda: task("accuracy"), ["metrics", "tuple"]),  # type: ignore[arg-type]
        (lambda: task(("f1",)), ["f1", "3"]),
        (lambda: task(("worst_client_accuracy",)), ["deal_test"]),
        (lambda: task(("accuracy",), iid((X, Y), 3, test=(X[:3], torch.tensor([0, 1, 3])))), ["test, y", "0 to 3", "0 to 2"]),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_is_spent(recipe: Any, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        run(recipe(), tmp_path / "run")
    assert all(word in str(refusal.value) for word in words)
    assert not (tmp_path / "run").exists()
