"""The recipes that come with the library, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpfed import algorithms
from dpfed.errors import InputError
from dpfed.privacy import Gaussian, Plain
from dpfed.recipe import Recipe
from dpfed.tasks import FashionMini

TASKS: dict[str, Callable[[], Any]] = {"fashion": FashionMini}
LEARNING_RATES = {"FedAvg": 0.3, "LocalAdamW": 0.003, "FedAdamW": 0.003}
CENTRALISED = {"SGD": 2.0, "Adam": 0.03, "AdamBC": 0.01, "AdamW": 0.03, "AdamWBC": 0.01, "MicroAdam": 0.03}
"""Learning rates of the algorithms whose server steps: a round is one local step, so they take five times the rounds."""


def methods() -> list[str]:
    """Every algorithm, with and without privacy, by the papers' names."""
    return [prefix + name for name in algorithms.__all__ for prefix in ("DP-", "")]


def quickstart() -> list[Recipe]:
    """DP-FedAdamW beside DP-FedAvg and DP-LocalAdamW, on real pictures of clothes, at the same epsilon."""
    return [named_recipe(f"fashion/{method}") for method in ("DP-FedAdamW", "DP-FedAvg", "DP-LocalAdamW")]


def named_recipe(name: str) -> Recipe:
    """``task/METHOD``: any task with any method, at settings that work."""
    task, _, method = name.partition("/")
    if task not in TASKS or method not in methods():
        raise InputError(f"recipe: there is no '{name}'. `dpfed list` shows the recipes.")
    kind = method.removeprefix("DP-")
    algorithm = getattr(algorithms, kind)(lr=(LEARNING_RATES | CENTRALISED)[kind])
    mechanism = Gaussian(epsilon=8.0, clip=1.0, batch_size=256) if method.startswith("DP-") else Plain(batch_size=256)
    steps = 1 if kind in CENTRALISED else 5
    rounds, evaluate_every = 200 // steps, 5 // steps
    return Recipe(TASKS[task](), algorithm, mechanism, rounds, steps, cohort=10, evaluate_every=evaluate_every)


def recipes(name: str) -> list[Recipe]:
    """What a name on the command line stands for."""
    return quickstart() if name == "quickstart" else [named_recipe(name)]
