"""The recipes that come with the library, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dpfed import algorithms
from dpfed.errors import InputError
from dpfed.mechanism import AsReleased, Gaussian, Plain
from dpfed.recipe import Recipe
from dpfed.tasks import Citation, FashionMini, Pictures, Sentences
from dpfed.tasks.finetuning import PICTURES, SENTENCES
from dpfed.tasks.graphs import ARXIV
from dpfed.tasks.images import CIFAR10, CIFAR100, FASHION_MNIST, TINY_IMAGENET
from dpfed.tasks.text import GLUE

TASKS: dict[str, Callable[[], Any]] = {
    "fashion": FashionMini,
    "citation": Citation,
    **{name: partial(Pictures, name) for name in PICTURES},
    **{name: partial(Sentences, name) for name in SENTENCES},
}
DATA_SETS = (CIFAR10, CIFAR100, TINY_IMAGENET, FASHION_MNIST, ARXIV, *(task.data_set for task in GLUE.values()))

# Learning rates for the packaged task: the best of two or three tried, at epsilon 3 and without privacy.
FEDERATED = {
    "FAFED": (0.1, 0.03),
    "FedAdamW": (0.02, 0.03),
    "FedAvg": (10.0, 1.0),
    "FedAvgLS": (10.0, 1.0),
    "FedCM": (10.0, 3.0),
    "FedLADA": (0.1, 0.03),
    "FedOpt": (3.0, 0.3),
    "FedProx": (10.0, 1.0),
    "FedSAM": (10.0, 1.0),
    "LocalAdam": (0.1, 0.03),
    "LocalAdamW": (0.1, 0.03),
    "Scaffold": (10.0, 1.0),
}
CENTRALISED = {
    "Adam": (0.1, 0.03),
    "AdamBC": (0.03, 0.03),
    "AdamW": (0.1, 0.03),
    "AdamWBC": (0.03, 0.03),
    "MicroAdam": (0.05, 0.03),
    "SGD": (30.0, 1.0),
}

# Where a task needs others: with privacy the best of three to five tried on PubMed's validation papers, at epsilon 6. Without,
# only Adam (two rates) and SGD were tried, which learned nothing in so few steps. What is not listed was not tried on graphs.
CITATION = {
    "Adam": (0.03, 0.03),
    "AdamBC": (0.003, 0.03),
    "AdamW": (0.03, 0.03),
    "AdamWBC": (0.003, 0.03),
    "SGD": (2.0, 2.0),
}

# Transformers under LoRA: those usual for them.
SGD_LIKE = ("FedAvg", "FedAvgLS", "FedCM", "FedProx", "FedSAM", "Scaffold", "FedOpt", "SGD")
TRANSFORMERS = {name: (1.0, 0.1) if name in SGD_LIKE else (1e-3, 1e-3) for name in algorithms.__all__}
TUNED = {"citation": CITATION, **dict.fromkeys((*PICTURES, *SENTENCES), TRANSFORMERS)}


def methods() -> list[str]:
    """Every algorithm, with and without privacy, by the papers' names."""
    return [prefix + name for name in algorithms.__all__ for prefix in ("DP-", "")]


def quickstart() -> list[Recipe]:
    """DP-FedAdamW beside DP-FedAvg and DP-LocalAdamW, on real pictures of clothes, at the same epsilon."""
    return [named_recipe(f"fashion/{method}") for method in ("DP-FedAdamW", "DP-FedAvg", "DP-LocalAdamW")]


def named_recipe(name: str) -> Recipe:
    """``task/METHOD``: any task with any method, at settings that work on the packaged task; ``task/as-released/METHOD``: with
    the mechanism of the released code of DP-FedAdamW, which is not private, for comparison.

    Where the server steps a round is one step, so these methods take more rounds, and larger batches, for the same epsilon.
    """
    task, _, method = name.partition("/")
    released, method = method.startswith("as-released/"), method.removeprefix("as-released/")
    if task not in TASKS or method not in methods() or (released and method.startswith("DP-")):
        raise InputError(f"recipe: there is no '{name}'. `dpfed list` shows the recipes.")
    kind, private = method.removeprefix("DP-"), method.startswith("DP-")
    rounds, local_steps, batch_size = (60, 1, 512) if kind in CENTRALISED else (30, 5, 256)
    with_privacy, without = (FEDERATED | CENTRALISED | TUNED.get(task, {}))[kind]
    algorithm = getattr(algorithms, kind)(lr=with_privacy if private or released else without)
    mechanism = Gaussian(epsilon=3.0, batch_size=batch_size) if private else Plain(batch_size=batch_size)
    mechanism = AsReleased(batch_size=batch_size) if released else mechanism
    made = TASKS[task]()
    return Recipe(made, algorithm, mechanism, rounds, local_steps, cohort=min(10, made.num_clients))


def recipes(name: str) -> list[Recipe]:
    """What a name on the command line stands for."""
    return quickstart() if name == "quickstart" else [named_recipe(name)]
