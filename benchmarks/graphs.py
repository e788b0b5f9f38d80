"""Is the graph worth its price? Private node classification with neighbours and on the features alone, in one table a graph.

    python -m benchmarks.graphs --root DATA

Every run lies in its folder under ``out``; what is finished there is not run again, and the table is made from the records.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import tyro

import dpfed
from dpfed.tasks.citation import Citation
from dpfed.tasks.graphs import GraphName

EPSILONS = (3.0, 6.0, 12.0)
# (with neighbours, on the features alone): the best of three to five tried on PubMed's validation papers, with one seed, at
# epsilon 6, in batches of 1024 and 60 steps.
LEARNING_RATES = {
    "SGD": (2.0, 2.0),
    "Adam": (0.03, 0.03),
    "AdamBC": (0.003, 0.01),
    "AdamW": (0.03, 0.03),
    "AdamWBC": (0.003, 0.01),
}
WITHOUT_PRIVACY = {"AdamW": (0.03, 0.01)}
BATCH = {"pubmed": 512, "cora": 256, "citeseer": 256}


def recipe(task: Citation, method: str, epsilon: float | None, rounds: int, seed: int) -> dpfed.Recipe:
    rates = LEARNING_RATES if epsilon else WITHOUT_PRIVACY
    algorithm = getattr(dpfed, method)(lr=rates[method][0 if task.degree else 1])
    size = BATCH[task.graph]
    mechanism = dpfed.Gaussian(epsilon=epsilon, batch_size=size) if epsilon else dpfed.Plain(batch_size=size)
    settings = {"local_steps": 1, "cohort": 1, "seed": seed, "schedule": "constant", "evaluate_every": rounds}
    return dpfed.Recipe(task, algorithm, mechanism, rounds=rounds, **settings)


def record(recipe: dpfed.Recipe, folder: Path) -> dpfed.RunRecord:
    """The run in the folder; done now, or gone on with, where it is not finished."""
    begun = (folder / "ledger.jsonl").exists()
    if begun and (stored := dpfed.RunRecord.open(folder)).finished:
        return stored
    return dpfed.run(recipe, folder, resume=begun)


def accuracies(
    task: Citation, method: str, epsilon: float | None, rounds: int, seeds: int, out: Path
) -> list[dict[str, float]]:
    name = f"{task.graph}-{'graph' if task.degree else 'features'}-{method}-{epsilon or 'plain'}"
    runs = [record(recipe(task, method, epsilon, rounds, seed), out / f"{name}-{seed}") for seed in range(seeds)]
    return [run.summary() | {"sigma": run.recipe["sigma"]} for run in runs]


def cell(found: list[dict[str, float]]) -> str:
    values = [100 * run["final_accuracy"] for run in found]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def table(graph: GraphName, root: str, degree: int, hidden: int, rounds: int, seeds: int, out: Path) -> Iterator[str]:
    tasks = [Citation(graph, root=root, degree=d, hidden=hidden) for d in (degree, 0)]
    federation = tasks[1].build(0)[1]
    assert federation.test is not None
    commonest = 100 * float(torch.bincount(federation.test["y"]).max()) / len(federation.test["y"])
    yield f"| {graph} | " + " | ".join(f"{arm}, ε = {e:g}" for arm in ("graph", "features") for e in EPSILONS) + " |"
    yield "|---" * 7 + "|"
    for method in LEARNING_RATES:
        cells = [cell(accuracies(task, method, e, rounds, seeds, out)) for task in tasks for e in EPSILONS]
        yield f"| DP-{method} | " + " | ".join(cells) + " |"
    noise = [accuracies(task, "AdamW", e, rounds, 1, out)[0]["sigma"] for task in tasks for e in EPSILONS]
    yield "| noise multiplier | " + " | ".join(f"{sigma:.2f}" for sigma in noise) + " |"
    plain = [cell(accuracies(task, "AdamW", None, rounds, seeds, out)) for task in tasks]
    yield f"\nWithout privacy (AdamW): {plain[0]} with the graph, {plain[1]} on the features. Always the commonest subject: "
    yield f"{commonest:.1f}. {len(federation.records['y']):,} papers to train on, batches of {BATCH[graph]}, {rounds} steps.\n"


def main(
    root: str,
    graphs: tuple[GraphName, ...] = ("pubmed", "cora", "citeseer"),
    degree: int = 2,
    hidden: int = 32,
    rounds: int = 40,
    seeds: int = 2,
    out: Path = Path("runs/graphs"),
) -> None:
    for graph in graphs:
        for line in table(graph, root, degree, hidden, rounds, seeds, out):
            print(line, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
