"""Every algorithm on one task, without privacy and at epsilon 8: does it learn, and how well, over two seeds?

    python -m benchmarks.every_algorithm --results every.jsonl
    python -m benchmarks.every_algorithm --results every.jsonl --task my.module:make_task --rounds 30 --batch 50

Each algorithm runs plain, private with local noise, and, where the server steps, private with distributed noise. The learning
rate is searched on the first seed alone: the middle of ``CENTRES`` and a factor of 4 to both sides; then the best one, by the
accuracy on the test records, runs with the other seeds. So the first seed's column is a little flattered, and every method is
flattered alike. All runs of one column have the same length and the same epsilon.

A line is written to ``--results`` after every run, and what is there is not run again: killed, or out of time, start it again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dpfed import FashionMini, Gaussian, InputError, Plain, Recipe, Simulation, algorithms
from dpfed.catalogue import CENTRALISED, FEDERATED
from dpfed.rounds import begin

# The middles of the search (private, plain): for the packaged task those of the catalogue, else those usual for LoRA.
SGD_LIKE = ("FedAvg", "FedAvgLS", "FedCM", "FedProx", "FedSAM", "Scaffold", "FedOpt", "SGD")
CENTRES = {
    "fashion": FEDERATED | CENTRALISED,
    "other": {name: (1.0, 0.1) if name in SGD_LIKE else (2e-3, 2e-3) for name in algorithms.__all__},
}
FACTORS = (1.0, 0.25, 4.0)


class Column(NamedTuple):
    """One way of running an algorithm."""

    name: str
    column: str
    mechanism: Gaussian | Plain
    rounds: int
    local_steps: int


def columns(chosen: argparse.Namespace) -> list[Column]:
    found: list[Column] = []
    for name in algorithms.__all__:
        central = name in CENTRALISED
        rounds, steps = (chosen.central_rounds, 1) if central else (chosen.rounds, chosen.steps)
        batch = chosen.central_batch if central else chosen.batch
        found.append(Column(name, "plain", Plain(batch_size=batch), rounds, steps))
        for noise in ("local", "distributed") if central else ("local",):
            private = Gaussian(epsilon=chosen.epsilon, clip=chosen.clip, batch_size=batch, noise=noise)
            found.append(Column(name, noise, private, rounds, steps))
    return found


def tried(recipe: Recipe, limit: float) -> dict[str, Any]:
    """One run, in a folder that is thrown away. One that takes too long, or diverges, has no accuracy, and says why."""
    began, why = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        record, rows = begin(recipe, Path(folder) / "run")
        try:
            for _ in rows:
                if time.monotonic() - began > limit:
                    why = f"more than {limit:g} seconds"
                    break
        except InputError as error:
            why = str(error).partition(". Lower it")[0]
        rows.close()  # type: ignore[attr-defined]
        summary = record.summary()
    seconds = round(time.monotonic() - began, 1)
    if why:
        return {"accuracy": None, "why": why, "rounds": summary["rounds"], "seconds": seconds}
    epsilon = None if math.isinf(summary["epsilon"]) else round(summary["epsilon"], 4)
    return {"accuracy": summary["final_accuracy"], "epsilon": epsilon, "rounds": summary["rounds"], "seconds": seconds}


def runs(chosen: argparse.Namespace, known: dict[tuple[Any, ...], Any]) -> Iterator[dict[str, Any]]:
    """The missing runs, one after the other: first every search, then the further seeds with what each found."""
    task: Any = (
        FashionMini() if chosen.task == "fashion" else getattr(importlib.import_module(chosen.task[0]), chosen.task[1])()
    )
    centres = CENTRES["fashion" if chosen.task == "fashion" else "other"]

    def run(at: Column, lr: float, seed: int) -> dict[str, Any]:
        algorithm = getattr(algorithms, at.name)(lr=lr)
        engine = Simulation(chosen.device, chosen.memory, precision=chosen.precision, compile=chosen.compile)
        settings = {"cohort": chosen.cohort, "seed": seed, "evaluate_every": at.rounds, "engine": engine}
        recipe = Recipe(task, algorithm, at.mechanism, at.rounds, at.local_steps, **settings)
        where = {"task": "".join(chosen.task), "name": at.name, "column": at.column, "lr": lr, "seed": seed}
        return where | tried(recipe, chosen.limit)

    names = [at for at in columns(chosen) if not chosen.only or at.name in chosen.only]
    for seed in range(chosen.seeds):
        for at in names:
            centre = centres[at.name][at.column == "plain"]
            rates = [centre * factor for factor in FACTORS[: chosen.search]] if seed == 0 else [best(known, at.name, at.column)]
            for lr in rates:
                if lr is not None and (at.name, at.column, lr, seed) not in known:
                    line = run(at, lr, seed)
                    known[at.name, at.column, lr, seed] = line
                    yield line


def best(known: dict[tuple[Any, ...], Any], name: str, column: str) -> float | None:
    """The learning rate that did best on the first seed."""
    searched = {key[2]: line["accuracy"] for key, line in known.items() if key[:2] == (name, column) and key[3] == 0}
    finished = {lr: accuracy for lr, accuracy in searched.items() if accuracy is not None}
    return max(finished, key=finished.__getitem__) if finished else None


def table(known: dict[tuple[Any, ...], Any], seeds: int) -> str:
    """Markdown: accuracy in percent, one number a seed, and the learning rate that was taken."""
    heads = {"plain": "without privacy", "local": "private", "distributed": "private, distributed noise"}
    lines = [f"| method | {' | '.join(f'{head} | lr' for head in heads.values())} |", "|---" * 7 + "|"]
    for name in algorithms.__all__:
        cells: list[str] = []
        for column in heads:
            lr = best(known, name, column)
            scores = [known.get((name, column, lr, seed), {}).get("accuracy") for seed in range(seeds)]
            texts = ["-" if score is None else f"{100 * score:.1f}" for score in scores]
            cells += ["", ""] if lr is None else [", ".join(texts), f"{lr:g}"]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--results", type=Path, required=True, help="a file of lines, one a run; what is in it is not run again")
    words.add_argument("--task", default="fashion", help="fashion, or module:function that makes a task")
    words.add_argument("--seeds", type=int, default=2)
    words.add_argument("--search", type=int, default=3, choices=(1, 2, 3), help="learning rates tried on the first seed")
    words.add_argument("--rounds", type=int, default=20)
    words.add_argument("--steps", type=int, default=5, help="local steps of a round")
    words.add_argument("--cohort", type=int, default=10)
    words.add_argument("--batch", type=int, default=128)
    words.add_argument("--central-rounds", type=int, default=60, help="where the server steps a round is one step")
    words.add_argument("--central-batch", type=int, default=256)
    words.add_argument("--epsilon", type=float, default=8.0)
    words.add_argument("--clip", type=float, default=1.0)
    words.add_argument("--limit", type=float, default=60.0, help="seconds for one run")
    words.add_argument("--budget", type=float, default=math.inf, help="seconds for all; the last run may end later")
    words.add_argument("--only", nargs="*", help="some of the algorithms")
    words.add_argument("--device", default="auto")
    words.add_argument("--memory", type=float, help="GiB in flight")
    words.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    words.add_argument("--compile", default="no", choices=("auto", "yes", "no"), help="many short runs are over before it pays")
    chosen = words.parse_args()
    if chosen.task != "fashion":
        chosen.task = tuple(chosen.task.split(":"))
    known: dict[tuple[Any, ...], Any] = {}
    if chosen.results.exists():
        for line in map(json.loads, chosen.results.read_text().splitlines()):
            known[line["name"], line["column"], line["lr"], line["seed"]] = line
    began, complete = time.monotonic(), True
    with chosen.results.open("a") as file:
        for line in runs(chosen, known):
            file.write(json.dumps(line) + "\n")
            file.flush()
            if time.monotonic() - began > chosen.budget:
                complete = False
                break
    print(table(known, chosen.seeds))
    print(f"\n{len(known)} runs, {time.monotonic() - began:.0f} s now{'' if complete else '; not all: start it again'}")


if __name__ == "__main__":
    main()
