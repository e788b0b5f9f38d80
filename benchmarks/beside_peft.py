"""Fine-tuning in a federation beside an ordinary PEFT loop on the same data; then what privacy costs.

    python -m benchmarks.beside_peft vit --results vit.jsonl
    python -m benchmarks.beside_peft minilm --results minilm.jsonl

Where models and data lie is said by the environment, see `benchmarks.real_tasks`. Every contestant starts from the same
weights with the same LoRA, and sees as many records. Without privacy:

    PEFT loop           all data in one place, shuffled, torch's AdamW, cosine
    AdamW               the same in a federation: every client takes part in every step, the server steps
    FedAdamW, FedAvg    20 local steps on 10 of the 50 clients a round; and the same with four times as many records

With privacy, at epsilon 3 and 8 (delta 1e-5, the worst client): local noise as in the papers, and distributed noise (the sum of
all clients alone is visible). Learning rates are searched on the first seed, by the accuracy on the test records, for the loop
as for everybody. A line is written to ``--results`` after every run, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import real_tasks
from benchmarks.every_algorithm import tried
from dpfed import AdamW, FedAdamW, FedAvg, Gaussian, Plain, Recipe, Simulation
from dpfed.flat import Records

BATCH, COHORT, STEPS = 150, 10, 20


class Contestant(NamedTuple):
    """``rates`` are tried on the first seed; the best runs with the others."""

    name: str
    rates: tuple[float, ...]
    algorithm: Any = None
    mechanism: Any = None
    rounds: int = 0
    local_steps: int = 1
    cohort: int = real_tasks.NUM_CLIENTS


def contestants(kind: str, num_records: int, epochs: float) -> list[Contestant]:
    seen = epochs * num_records
    steps, rounds = math.ceil(seen / BATCH), math.ceil(seen / (COHORT * STEPS * 32))
    adam, sgd = ((1e-3, 3e-3), (0.1, 0.3)) if kind == "vit" else ((3e-4, 1e-3), (0.03, 0.1))
    central = Plain(batch_size=BATCH // real_tasks.NUM_CLIENTS)
    found = [
        Contestant("PEFT loop", adam),
        Contestant("AdamW", adam, AdamW, central, steps),
        Contestant("FedAdamW", adam, FedAdamW, Plain(batch_size=32), rounds, STEPS, COHORT),
        Contestant("FedAvg", sgd, FedAvg, Plain(batch_size=32), rounds, STEPS, COHORT),
        Contestant("FedAdamW, 4 x", adam, FedAdamW, Plain(batch_size=32), 4 * rounds, STEPS, COHORT),
        Contestant("FedAvg, 4 x", sgd, FedAvg, Plain(batch_size=32), 4 * rounds, STEPS, COHORT),
    ]
    for epsilon in (3.0, 8.0):
        local = Gaussian(epsilon=epsilon, clip=0.5, batch_size=64)
        shared = Gaussian(epsilon=epsilon, clip=0.5, batch_size=64, noise="distributed")
        found += [
            Contestant(f"DP-FedAdamW, epsilon {epsilon:g}", (3e-4, 1e-3), FedAdamW, local, 20, 5, COHORT),
            Contestant(f"DP-AdamW, epsilon {epsilon:g}, distributed", (1e-3, 3e-3), AdamW, shared, 50),
        ]
    return found


def peft_loop(kind: str, lr: float, seed: int, epochs: float, device: str) -> float:
    """What the tutorials of PEFT do: one model, shuffled batches, AdamW, a schedule, mixed precision."""
    train, test = (to(records, device) for records in (real_tasks.cifar() if kind == "vit" else real_tasks.sst2()))
    model: nn.Module = (real_tasks.vit if kind == "vit" else real_tasks.minilm)(seed).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.01)
    num_steps = math.ceil(epochs * len(train["y"]) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    random, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    half = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    for _ in range(num_steps):
        if len(order) < BATCH:
            order = torch.cat([order, torch.randperm(len(train["y"]), generator=random)])
        rows, order = order[:BATCH].to(device), order[BATCH:]
        with half:
            loss = nn.functional.cross_entropy(logits(model, {n: c[rows] for n, c in train.items()}), train["y"][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        parts = [
            logits(model, dict(zip(test, part, strict=True))).argmax(1)
            for part in zip(*(c.split(500) for c in test.values()), strict=True)
        ]
    return float((torch.cat(parts) == test["y"]).double().mean())


def to(records: Records, device: str) -> Records:
    return {name: column.to(device) for name, column in records.items()}


def logits(model: nn.Module, records: Records) -> Tensor:
    named = {name: column for name, column in records.items() if name != "y"}
    return model(named["x"]) if set(named) == {"x"} else model(**named)


def run(kind: str, at: Contestant, lr: float, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    where = {"kind": kind, "name": at.name, "lr": lr, "seed": seed}
    if at.algorithm is None:
        began = time.monotonic()
        accuracy = peft_loop(kind, lr, seed, chosen.epochs, chosen.device)
        return where | {"accuracy": accuracy, "seconds": round(time.monotonic() - began, 1)}
    make = real_tasks.vit_on_cifar if kind == "vit" else real_tasks.minilm_on_sst2
    rank = 4 if at.mechanism.sigma != 0 else 16  # fewer coordinates under noise
    precision: Any = "bfloat16" if chosen.device == "cuda" else "float32"
    engine = Simulation(chosen.device, chosen.memory, precision=precision, compile="no")  # each run is too short for it
    setting = {"cohort": at.cohort, "seed": seed, "evaluate_every": at.rounds, "engine": engine}
    recipe = Recipe(make(seed, rank), at.algorithm(lr=lr), at.mechanism, at.rounds, at.local_steps, **setting)
    return where | tried(recipe, chosen.limit)


def runs(chosen: argparse.Namespace, known: dict[tuple[Any, ...], Any]) -> Iterator[dict[str, Any]]:
    num_records = len((real_tasks.cifar() if chosen.kind == "vit" else real_tasks.sst2())[0]["y"])
    for at in contestants(chosen.kind, num_records, chosen.epochs):
        if chosen.only and not at.name.startswith(tuple(chosen.only)):
            continue
        for seed in range(chosen.seeds):
            rates = at.rates if seed == 0 else [rate for rate in [best(known, at.name)] if rate is not None]
            for lr in rates:
                if (at.name, lr, seed) not in known:
                    line = run(chosen.kind, at, lr, seed, chosen)
                    known[at.name, lr, seed] = line
                    yield line


def best(known: dict[tuple[Any, ...], Any], name: str) -> float | None:
    """The learning rate that did best on the first seed."""
    first = {key[1]: line["accuracy"] for key, line in known.items() if key[0] == name and key[2] == 0}
    finished = {lr: accuracy for lr, accuracy in first.items() if accuracy is not None}
    return max(finished, key=finished.__getitem__) if finished else None


def table(known: dict[tuple[Any, ...], Any], seeds: int) -> str:
    lines = ["| contestant | accuracy by seed | lr | seconds |", "|---|---|---|---|"]
    for name in dict.fromkeys(key[0] for key in known):
        lr = best(known, name)
        mine = [known.get((name, lr, seed), {}) for seed in range(seeds)]
        scores = ["-" if line.get("accuracy") is None else f"{100 * line['accuracy']:.1f}" for line in mine]
        lines.append(f"| {name} | {', '.join(scores)} | {lr} | {mine[0].get('seconds', '-')} |")
    return "\n".join(lines)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("kind", choices=("vit", "minilm"))
    words.add_argument("--results", type=Path, required=True, help="a file of lines, one a run; what is in it is not run again")
    words.add_argument("--seeds", type=int, default=2)
    words.add_argument("--epochs", type=float, default=3.0, help="how often every record is seen, in the mean")
    words.add_argument("--limit", type=float, default=120.0, help="seconds for one run")
    words.add_argument("--budget", type=float, default=math.inf, help="seconds for all; the last run may end later")
    words.add_argument("--only", nargs="*", help="contestants whose names begin so")
    words.add_argument("--memory", type=float, help="GiB in flight")
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = words.parse_args()
    lines = chosen.results.read_text().splitlines() if chosen.results.exists() else []
    known = {(line["name"], line["lr"], line["seed"]): line for line in map(json.loads, lines)}
    began = time.monotonic()
    with chosen.results.open("a") as file:
        for line in runs(chosen, known):
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(line, flush=True)
            if time.monotonic() - began > chosen.budget:
                print("not all: start it again", flush=True)
                break
    print(table(known, chosen.seeds))


if __name__ == "__main__":
    main()
