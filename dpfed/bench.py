"""How fast it is on this machine: private steps beside the same without privacy, an ordinary loop, and Opacus if it is there.

Peers take gradients of their own, which no other file of the library may. They see the packaged pictures and nothing else, and
nothing that they compute is kept. All take turns, so that whatever else the machine does hits them alike; ratios are medians of
the ratios of a turn.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn

from dpfed.algorithm import Round
from dpfed.algorithms import FedAvg
from dpfed.data import iid
from dpfed.engines.simulation import Job, Simulation
from dpfed.flat import FlatModel, Records
from dpfed.mechanism import Gaussian, Mechanism, Plain
from dpfed.recipe import Recipe
from dpfed.rounds import begin
from dpfed.tasks import FashionMini, Task

CLASSES, CLIP, SIGMA, LR = 10, 1.0, 1.0, 0.01
PRIVATE, PLAIN, LOOP, OPACUS = (
    "private",
    "the same without privacy",
    "no privacy, client after client",
    "Opacus, client after client",
)
Step = Callable[[], object]


class Work(NamedTuple):
    """A model, and a cohort of so many clients with batches of so many records."""

    name: str
    module: nn.Module
    num_clients: int
    batch_size: int


class Line(NamedTuple):
    """One contestant of one table: medians, and how often the private step fits into it."""

    name: str
    milliseconds: float
    ratio: float


def works() -> list[Work]:
    side, first, second = 14, nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    mlp = nn.Sequential(nn.Linear(side * side, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    halved = [nn.Unflatten(1, (1, side, side)), first, nn.GroupNorm(4, 16), nn.ReLU(), nn.AvgPool2d(2)]
    cnn = nn.Sequential(*halved, second, nn.GroupNorm(4, 32), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(288, CLASSES))
    return [
        Work("linear", nn.Linear(side * side, CLASSES), 10, 32),
        Work("perceptron", mlp, 10, 32),
        Work("convolutions", cnn, 5, 16),
    ]


def machine(device: torch.device) -> str:
    """What it ran on, in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}; torch {torch.__version__}"
    known = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in known.read_text().splitlines() if line.startswith("model name")]
        if (known.exists())
        else []
    )
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} of {os.cpu_count()} cores; torch {torch.__version__}"


def compare(work: Work, device: torch.device, seconds: float) -> list[Line]:
    """One step of the whole cohort, by everybody in turns."""
    records = FashionMini().build(0)[1].records
    chosen = torch.arange(work.num_clients * 4 * work.batch_size)
    records = {name: column[chosen].to(device) for name, column in records.items()}
    mechanisms: dict[str, Mechanism] = {
        PRIVATE: Gaussian(sigma=SIGMA, clip=CLIP, batch_size=work.batch_size),
        PLAIN: Plain(batch_size=work.batch_size),
    }
    steps = {name: engine_step(work, records, mechanism, device) for name, mechanism in mechanisms.items()}
    steps[LOOP] = loop_step(work, records, device, lambda module: (module, torch.optim.SGD(module.parameters(), LR)))
    if find_spec("opacus"):
        steps[OPACUS] = loop_step(work, records, device, lambda module: with_opacus(module, work.batch_size))
    taken = take_turns(steps, device, seconds)
    ratios = {name: median(t / ours for t, ours in zip(times, taken[PRIVATE], strict=True)) for name, times in taken.items()}
    return [Line(name, 1000 * median(times), ratios[name]) for name, times in taken.items()]


def engine_step(work: Work, records: Records, mechanism: Mechanism, device: torch.device) -> Step:
    """A round of one local step by the simulation: batches, gradients, noise, the mean of the uploads."""
    model, federation = FlatModel(deepcopy(work.module)), iid(records, work.num_clients)
    job = Job(model, federation, FedAvg(lr=LR), mechanism, seed=0, cohort=work.num_clients)
    engine, rounds = Simulation(device=str(device)).open(job), iter(range(10**9))
    s = job.algorithm.server_init(model.theta0().to(device), model.layout)
    return lambda: engine.train(Round(next(rounds), 1.0, 1, model.layout), s, list(range(work.num_clients)))


def loop_step(work: Work, records: Records, device: torch.device, prepare: Callable[[nn.Module], tuple[Any, Any]]) -> Step:
    """Client after client: forward, backward, step."""
    clients = [prepare(deepcopy(work.module).to(device).train()) for _ in range(work.num_clients)]
    batches = [
        {n: column[4 * work.batch_size * i :][: work.batch_size] for n, column in records.items()} for i in range(len(clients))
    ]

    def step() -> None:
        for (module, optimizer), batch in zip(clients, batches, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(batch["x"]), batch["y"]).backward()
            optimizer.step()

    return step


def with_opacus(module: nn.Module, batch_size: int) -> tuple[Any, Any]:
    warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
    opacus: Any = import_module("opacus")
    hooked = opacus.GradSampleModule(module)
    setting = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "expected_batch_size": batch_size}
    return hooked, import_module("opacus.optimizers").DPOptimizer(torch.optim.SGD(hooked.parameters(), LR), **setting)


def take_turns(steps: dict[str, Step], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Seconds of every turn, after one to warm up; at least three turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    end, turn = float("inf"), 0
    while turn < 4 or time.perf_counter() < end:
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken[name].append(time.perf_counter() - began)
        end, turn = (time.perf_counter() + seconds if turn == 0 else end), turn + 1
    return {name: times[1:] for name, times in taken.items()}


def rounds(device: torch.device, seconds: float) -> Iterator[tuple[int, float]]:
    """Cohorts, and the milliseconds of a whole round of a run with a tiny model, without the wait for the disk."""
    random = torch.Generator().manual_seed(0)
    for cohort in (1, 10, 100, 1000):
        x, y = torch.randn(20 * cohort, 20, generator=random), torch.arange(20 * cohort) % 2
        task = Task(nn.Linear(20, 2), iid((x, y), cohort))
        mechanism = Gaussian(sigma=SIGMA, clip=CLIP, batch_size=8)
        setting: dict[str, Any] = {"local_steps": 1, "schedule": "constant", "engine": Simulation(device=str(device))}
        recipe = Recipe(task, FedAvg(), mechanism, rounds=5000, cohort=cohort, evaluate_every=5000, **setting)
        with TemporaryDirectory() as folder:
            record, rows = begin(recipe, Path(folder) / "run")
            next(rows)
            began, times = time.perf_counter(), list[float]()
            while time.perf_counter() < began + seconds or len(times) < 5:
                before = time.process_time()
                next(rows)
                times.append(time.process_time() - before)
            record.close()
        yield cohort, 1000 * median(times)


def fsync_milliseconds() -> float:
    """What it takes here until a line is really on the disk: what the charge of every round waits for."""
    with TemporaryDirectory() as folder, (Path(folder) / "line").open("ab") as file:
        times: list[float] = []
        for _ in range(20):
            file.write(b"x" * 200)
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return 1000 * median(times)
