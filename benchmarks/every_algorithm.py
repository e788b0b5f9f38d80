"""Every algorithm on one task, without privacy and at epsilon 8: does it learn, and how well, over two seeds?

    python -m benchmarks.every_algorithm --results every.jsonl
    python -m benchmarks.every_algorithm --results every.jsonl --task my.module:make_task --rounds 30 --batch 50

Each algorithm runs plain, private with local noise, and, where the server steps, private with distributed noise; all runs of a
column at the same epsilon. How learning rates are found: `benchmarks.search`. A task of one's own is a function of the seed.
"""

from __future__ import annotations

import argparse
import importlib
from functools import cache, partial
from typing import Any

from benchmarks.search import Contestant, Known, Line, engine, run_all, scores, tried, words
from dpfed import FashionMini, Gaussian, Plain, Recipe, algorithms
from dpfed.catalogue import CENTRALISED, FEDERATED

# Where the search begins (private, plain): for the packaged task with the rates of the catalogue; for a transformer under LoRA
# with about what a new head alone liked best, trained for as long on the features that the model has from the start, and lower
# where that was too much for the whole.
TRANSFORMERS = {
    **dict.fromkeys(("FedAvg", "FedProx", "Scaffold", "FedOpt", "SGD"), (4.0, 1.6)),
    "FedSAM": (1.0, 1.6),
    "FedAvgLS": (2.0, 0.8),
    "FedCM": (8.0, 3.2),
    **dict.fromkeys(("Adam", "AdamW", "AdamBC", "AdamWBC"), (8e-3, 8e-3)),
    **dict.fromkeys(("LocalAdam", "LocalAdamW", "FedLADA", "FAFED"), (0.032, 4e-3)),
    "MicroAdam": (0.032, 0.016),
    "FedAdamW": (8e-3, 8e-3),
}
HEADS = {"plain": "without privacy", "local": "private", "distributed": "private, distributed noise"}


def contestants(chosen: argparse.Namespace) -> list[Contestant]:
    found: list[Contestant] = []
    for name in algorithms.__all__:
        central = name in CENTRALISED
        rounds, steps = (chosen.central_rounds, 1) if central else (chosen.rounds, chosen.steps)
        batch = chosen.central_batch if central else chosen.batch
        for column in chosen.columns:
            if column == "distributed" and not central:
                continue
            private = {"epsilon": chosen.epsilon, "clip": chosen.clip, "batch_size": batch, "noise": column}
            mechanism = Plain(batch_size=batch) if column == "plain" else Gaussian(**private)
            centre = (FEDERATED | CENTRALISED if chosen.task == "fashion" else TRANSFORMERS)[name][column == "plain"]
            found.append(Contestant(f"{name}, {column}", centre, partial(run, chosen, name, mechanism, rounds, steps)))
    return found


def run(
    chosen: argparse.Namespace, name: str, mechanism: Gaussian | Plain, rounds: int, steps: int, lr: float, seed: int
) -> Line:
    setting = {"cohort": chosen.cohort, "seed": seed, "evaluate_every": rounds, "engine": engine(chosen)}
    algorithm = getattr(algorithms, name)(lr=lr)
    return tried(Recipe(task_of(chosen.task, seed), algorithm, mechanism, rounds, steps, **setting), chosen)


@cache
def task_of(name: str, seed: int) -> Any:
    """Read and dealt once for all runs of a seed."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(seed) if function else FashionMini()


def table(known: Known, chosen: argparse.Namespace) -> str:
    """Markdown."""
    lines = [f"| method | {' | '.join(f'{HEADS[column]} | lr (others tried)' for column in chosen.columns)} |"]
    lines.append("|---" * (1 + 2 * len(chosen.columns)) + "|")
    by_name = {at.name: at for at in contestants(chosen)}
    for name in algorithms.__all__:
        cells = [by_name.get(f"{name}, {column}") for column in chosen.columns]
        texts = [" | " if at is None else " | ".join(scores(known, at, chosen.seeds)) for at in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    made = words(__doc__)
    made.add_argument("--task", default="fashion", help="fashion, or module:function that makes a task for a seed")
    made.add_argument("--columns", nargs="*", default=list(HEADS), choices=list(HEADS))
    made.add_argument("--rounds", type=int, default=20)
    made.add_argument("--steps", type=int, default=5, help="local steps of a round")
    made.add_argument("--cohort", type=int, default=10)
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--central-rounds", type=int, default=60, help="where the server steps a round is one step")
    made.add_argument("--central-batch", type=int, default=256)
    made.add_argument("--epsilon", type=float, default=8.0)
    made.add_argument("--clip", type=float, default=1.0)
    chosen = made.parse_args()
    print(table(run_all(contestants(chosen), chosen), chosen))


if __name__ == "__main__":
    main()
