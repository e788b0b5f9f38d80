"""By turns: one part is trained as if it were all there is, and the other one rests, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpfed import Alternating, FedAdamW, FedAvg, Gaussian, InputError, Recipe, Simulation, Task, algorithms, iid
from dpfed.recipe import from_json, to_json
from dpfed.rounds import begin, dry_round, run

PRIVATE = Gaussian(sigma=0.8, clip=0.5, batch_size=5)


class Low(nn.Module):
    """A head and one product of low rank. ``frozen``: the letters of what is not trained."""

    def __init__(self, frozen: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.head = nn.Linear(5, 3)
        for letter, part in (("A", self.lora_A), ("B", self.lora_B), ("h", self.head)):
            part.requires_grad_(letter not in frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lora_B(self.lora_A(x)).tanh())


def recipe(algorithm: Any, rounds: int = 4, frozen: str = "", mechanism: Any = PRIVATE, **more: Any) -> Recipe:
    random = torch.Generator().manual_seed(3)
    federation = iid((torch.randn(40, 4, generator=random), torch.arange(40) % 3), 4)
    settings: dict[str, Any] = {"local_steps": 2, "cohort": 3, "schedule": "constant"} | more
    return Recipe(Task(Low(frozen).double(), _double(federation)), algorithm, mechanism, rounds, **settings)


def _double(federation: Any) -> Any:
    federation.records["x"] = federation.records["x"].double()
    return federation


def ends(recipe: Recipe, folder: Path) -> dict[str, Tensor]:
    return run(recipe, folder).load_model()


@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_algorithm_takes_turns_or_says_why_not(name: str, tmp_path: Path) -> None:
    inner = getattr(algorithms, name)(lr=0.05)
    steps = {"local_steps": 1 if name in ("Adam", "AdamBC", "AdamW", "AdamWBC", "MicroAdam", "SGD") else 2}
    if dry_round(inner, 1).memory is not None:
        with pytest.raises(InputError, match="keeps none"):
            run(recipe(Alternating(inner), **steps), tmp_path / "memory")
        return
    after = [ends(recipe(Alternating(inner), rounds, **steps), tmp_path / str(rounds)) for rounds in (1, 2, 3)]
    start = dict(Low().double().named_parameters())
    for number, (before, now) in enumerate(zip([start, *after], after, strict=False)):
        for part, tensor in now.items():
            rests = ("lora_B" in part) == (number % 2 == 0)
            assert tensor.equal(before[part]) == rests, (number, part)


@pytest.mark.parametrize("inner", [FedAvg(lr=0.5), FedAdamW(lr=0.02)])
def test_a_turn_is_the_algorithm_on_that_part_alone(inner: Any, tmp_path: Path) -> None:
    turns = ends(recipe(Alternating(inner), 1), tmp_path / "turns")
    alone = ends(recipe(inner, 1, frozen="B"), tmp_path / "alone")
    for part, tensor in alone.items():
        torch.testing.assert_close(turns[part], tensor, rtol=1e-12, atol=1e-12)


def test_turns_cost_what_the_algorithm_costs(tmp_path: Path) -> None:
    plain, turns = (run(recipe(a), tmp_path / str(n)) for n, a in enumerate((FedAvg(), Alternating(FedAvg()))))
    assert turns.ledger.epsilon(1e-5) == plain.ledger.epsilon(1e-5)
    assert [row["bytes_up"] for row in turns.rows] == [8 * 26, 8 * 10] * 2
    assert {row["bytes_up"] for row in plain.rows} == {8 * 36}


def test_a_matrix_of_clients_is_one_after_the_other(tmp_path: Path) -> None:
    ways = [recipe(Alternating(FedAdamW(lr=0.02)), engine=Simulation(clients_at_once=number)) for number in (1, 3)]
    one, many = (ends(way, tmp_path / str(n)) for n, way in enumerate(ways))
    for part, tensor in one.items():
        torch.testing.assert_close(many[part], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stop", [1, 2])
def test_going_on_is_not_stopping(stop: int, tmp_path: Path) -> None:
    whole = ends(recipe(Alternating(FedAdamW(lr=0.02))), tmp_path / "whole")
    _, rows = begin(recipe(Alternating(FedAdamW(lr=0.02))), tmp_path / "parts")
    for _ in range(stop):
        next(rows)
    rows.close()  # type: ignore[attr-defined]
    resumed = run(recipe(Alternating(FedAdamW(lr=0.02))), tmp_path / "parts", resume=True).load_model()
    assert all(tensor.equal(resumed[part]) for part, tensor in whole.items())


@pytest.mark.parametrize(
    "more",
    [
        {"mechanism": Gaussian(sigma=0.8, clip=0.5, batch_size=5, clipping="adaptive")},
        {"mechanism": Gaussian(sigma=0.8, clip=0.5, batch_size=5, clipping="block")},
        {"mechanism": Gaussian(sigma=0.8, clip=0.5, batch_size=5, unit="client"), "cohort_sampling": "poisson"},
        {"mechanism": Gaussian(sigma=0.8, clip=0.5, batch_size=5, noise="distributed"), "local_steps": 1},
        {"diagnostics": True},
        {"average": "ema"},
    ],
)
def test_the_switches_of_a_run_hold_by_turns(more: dict[str, Any], tmp_path: Path) -> None:
    inner = algorithms.SGD(lr=0.1) if more.get("local_steps") == 1 else FedAdamW(lr=0.02)
    record = run(recipe(Alternating(inner), **more), tmp_path / "run")
    assert len(record.rows) == 4
    assert 0 < record.ledger.epsilon(1e-5) < float("inf")


def test_it_has_a_name_and_survives_a_file() -> None:
    ours = recipe(Alternating(FedAdamW(lr=0.02)))
    assert ours.name == "DP-FedAdamW by turns"
    assert from_json(to_json(ours.algorithm)) == ours.algorithm


@pytest.mark.parametrize("frozen", ["A", "B", "Ah"])
def test_models_without_two_factors_are_refused(frozen: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="LoRA"):
        run(recipe(Alternating(FedAvg()), frozen=frozen), tmp_path / "run")
