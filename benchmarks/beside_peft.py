"""Fine-tuning in a federation beside an ordinary PEFT loop on the same data; then what privacy costs.

    python -m benchmarks.beside_peft vit --results vit.jsonl
    python -m benchmarks.beside_peft minilm --results minilm.jsonl --epochs 1

Where models and data lie is said by the environment, see `benchmarks.real_tasks`. Every contestant starts from the same
weights. Without privacy, with the same LoRA of rank 16 on all linear layers, and as many records seen:

    PEFT loop           all data in one place, shuffled, batches of 150, torch's AdamW, a cosine over the steps
    AdamW               the same in a federation: all 50 clients take part in every step with 3 records each, so that a batch
                        has 150 as the loop's has, and the server steps; every client goes through its records in passes
    FedAdamW, FedAvg    20 local steps on 32 records in 10 of the 50 clients a round, in passes; and four times as many rounds

The loop and AdamW also in float32. Drawn afresh: batches are drawn anew from all records of a client in every step, so that
after three epochs one in twenty was never seen. FedAdamW and FedAvg in passes take the rate that was found so.

With privacy, at epsilon 3 and 8 (delta 1e-5, the worst client): all 50 clients in every round, 32 records a client in the mean;
local noise as in the papers with 5 local steps a round, and distributed noise (the sum of all alone is visible) with one.
LoRA of rank 2 on query and value: fewer coordinates under noise. How learning rates are found, for the loop as for everybody:
`benchmarks.search`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import real_tasks
from benchmarks.search import Contestant, Known, Line, engine, run_all, scores, tried, words
from dpfed import AdamW, FedAdamW, FedAvg, Gaussian, Plain, Recipe
from dpfed.flat import Records

BATCH, COHORT, STEPS = 150, 10, 20
CENTRES = {"vit": {"adam": 3e-3, "sgd": 1.0, "private": 9e-3}, "minilm": {"adam": 1e-3, "sgd": 0.5, "private": 9e-3}}


def contestants(chosen: argparse.Namespace) -> list[Contestant]:
    centres = CENTRES[chosen.kind]

    def rounds(of_records: int) -> int:
        return math.ceil(chosen.epochs * chosen.num_records / of_records)

    def trained(algorithm: Any, mechanism: Gaussian | Plain, num_rounds: int, **setting: Any) -> Callable[[float, int], Line]:
        return partial(run, chosen, algorithm, mechanism, num_rounds, {"engine": engine(chosen)} | setting)

    few, all_of_them = {"cohort": COHORT, "local_steps": STEPS}, {"cohort": real_tasks.NUM_CLIENTS, "local_steps": 1}
    three, many = (Plain(batch_size=size, sampling="shuffled") for size in (BATCH // real_tasks.NUM_CLIENTS, 32))
    exact = argparse.Namespace(**(vars(chosen) | {"precision": "float32"}))
    short = rounds(COHORT * STEPS * 32)
    steps = partial(trained, AdamW, num_rounds=rounds(BATCH), **all_of_them)
    found = [
        Contestant("PEFT loop", centres["adam"], partial(peft_loop, chosen)),
        Contestant("PEFT loop, float32", centres["adam"], partial(peft_loop, exact)),
        Contestant("AdamW", centres["adam"], steps(three)),
        Contestant("AdamW, float32", centres["adam"], steps(three, engine=engine(exact))),
        Contestant("AdamW, drawn afresh", centres["adam"], steps(replace(three, sampling="fixed"))),
    ]
    for algorithm, rate in ((FedAdamW, "adam"), (FedAvg, "sgd")):
        searched = f"{algorithm.__name__}, drawn afresh"
        for mechanism, drawing in ((replace(many, sampling="fixed"), ", drawn afresh"), (many, "")):
            for times, more in ((1, ""), (4, ", 4 x")):
                name = algorithm.__name__ + more + drawing
                run_it = trained(algorithm, mechanism, times * short, **few)
                found.append(Contestant(name, centres[rate], run_it, like="" if name == searched else searched))
    for epsilon in (3.0, 8.0):
        private = partial(Gaussian, epsilon=epsilon, clip=1.0, batch_size=32)
        shared = trained(AdamW, private(noise="distributed"), chosen.private_steps, **all_of_them)
        local = trained(FedAdamW, private(), chosen.private_steps // 5, **(all_of_them | {"local_steps": 5}))
        found.append(Contestant(f"DP-AdamW, distributed noise, epsilon {epsilon:g}", centres["private"], shared))
        found.append(Contestant(f"DP-FedAdamW, epsilon {epsilon:g}", centres["private"], local))
    return found


def run(
    chosen: argparse.Namespace, algorithm: Any, mechanism: Any, rounds: int, setting: dict[str, Any], lr: float, seed: int
) -> Line:
    task = task_of(chosen.kind, seed, small=isinstance(mechanism, Gaussian))
    setting = setting | {"seed": seed, "evaluate_every": rounds}
    return tried(Recipe(task, algorithm(lr=lr), mechanism, rounds, **setting), chosen)


@cache
def task_of(kind: str, seed: int, small: bool) -> Any:
    """Read and dealt once for all runs of a seed."""
    make = real_tasks.vit_on_cifar if kind == "vit" else real_tasks.minilm_on_sst2
    return make(seed, **(real_tasks.SMALL if small else {}))


def peft_loop(chosen: argparse.Namespace, lr: float, seed: int) -> Line:
    """What the tutorials of PEFT do: one model, shuffled batches, AdamW, a schedule, mixed precision."""
    began, device = time.monotonic(), chosen.device
    train, test = (to(records, device) for records in data_of(chosen.kind))
    model: nn.Module = (real_tasks.vit if chosen.kind == "vit" else real_tasks.minilm)(seed).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.01)
    num_steps = math.ceil(chosen.epochs * chosen.num_records / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    random, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    half = torch.autocast(device, torch.bfloat16, enabled=chosen.precision == "bfloat16")
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
    accuracy = float((torch.cat(parts) == test["y"]).double().mean())
    return {"accuracy": accuracy, "seconds": round(time.monotonic() - began, 1)}


def data_of(kind: str) -> tuple[Records, Records]:
    return real_tasks.cifar() if kind == "vit" else real_tasks.sst2()


def to(records: Records, device: str) -> Records:
    return {name: column.to(device) for name, column in records.items()}


def logits(model: nn.Module, records: Records) -> Tensor:
    named = {name: column for name, column in records.items() if name != "y"}
    return model(named["x"]) if set(named) == {"x"} else model(**named)


def table(known: Known, chosen: argparse.Namespace) -> str:
    """Markdown."""
    lines = ["| contestant | accuracy by seed | lr (others tried) | sigma | seconds a run |", "|---" * 5 + "|"]
    for at in contestants(chosen):
        mine = [line for (name, _, _), line in known.items() if name == at.name]
        sigma = next((line["sigma"] for line in mine if line.get("sigma")), "")
        seconds = "".join(f"{line['seconds'] - line.get('startup', 0):.1f}" for line in mine[-1:] if "seconds" in line)
        lines.append(f"| {at.name} | {' | '.join([*scores(known, at, chosen.seeds), str(sigma), seconds])} |")
    return "\n".join(lines)


def main() -> None:
    made = words(__doc__)
    made.set_defaults(factor=3.0)
    made.add_argument("kind", choices=("vit", "minilm"))
    made.add_argument("--epochs", type=float, default=3.0, help="how often every record is seen, in the mean")
    made.add_argument("--num-records", type=int, help="that there are taken to be, to try it shorter")
    made.add_argument("--private-steps", type=int, default=60)
    chosen = made.parse_args()
    chosen.num_records = chosen.num_records or len(data_of(chosen.kind)[0]["y"])
    print(table(run_all(contestants(chosen), chosen), chosen))


if __name__ == "__main__":
    main()
