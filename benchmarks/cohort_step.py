"""One private step of a whole cohort, timed beside its peers: Opacus client after client, and no privacy at all.

Every contestant does the same work on the same batches from the same parameters, which differ from client to client: clip the
gradient of every record, sum, add noise, take one SGD step for every client. Before anything is timed, the clipped sums without
noise have to agree. The contestants take turns, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import math
import platform
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import opacus
import peft
import torch
import tyro
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpfed import FashionMini, FedAvg, Federation, FlatModel, Gaussian, InputError, Plain, iid
from dpfed.algorithm import Round
from dpfed.data import generator
from dpfed.engines.simulation import Job, Simulation, SimulationEngine
from dpfed.flat import Records, cross_entropy
from dpfed.models.transformer import configuration, image_classifier
from dpfed.models.tuning import lora
from dpfed.privacy import Mechanism, Part, PrivateGradient

LR, CLIP, SIGMA, CLASSES, SIDE = 0.01, 1.0, 1.0, 10, 14
PIXELS = SIDE * SIDE
Step = Callable[[], object]


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention, self.before_attention = Attention(width, num_heads), nn.LayerNorm(width)
        self.widen, self.narrow, self.before_mlp = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.narrow(nn.functional.gelu(self.widen(self.before_mlp(x))))


class SmallTransformer(nn.Module):
    """A vision transformer of the simplest layers: 49 patches of 2 x 2 pixels, sinusoidal positions, mean of the tokens."""

    positions: Tensor

    def __init__(self, width: int = 64, num_heads: int = 4, num_blocks: int = 2, patch: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(patch * patch, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)
        self.per_side, self.patch = SIDE // patch, patch
        angles = torch.outer(torch.arange(self.per_side**2), 1e4 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, x: Tensor) -> Tensor:
        grid = x.unflatten(1, (self.per_side, self.patch, self.per_side, self.patch))
        tokens = self.embed(grid.transpose(2, 3).flatten(3).flatten(1, 2)) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def linear() -> nn.Module:
    return nn.Linear(PIXELS, CLASSES)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(PIXELS, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def cnn() -> nn.Module:
    first = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AvgPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AvgPool2d(2)
    return nn.Sequential(nn.Unflatten(1, (1, SIDE, SIDE)), *first, *second, nn.Flatten(), nn.Linear(32 * 9, CLASSES))


def vit_tiny(ordinary: bool = False) -> nn.Module:
    """ViT-Tiny on 8 x 8 patches of 4 x 4 pixels (65 tokens), with PEFT's LoRA of rank 16 on all linear layers.

    ``ordinary``: as transformers and PEFT have it without dpfed, in their fastest way.
    """
    classifier = image_classifier(configuration("vit-tiny", image_size=32, patch_size=4), 100, dropout=0.0)
    if not ordinary:
        return lora(classifier, targets="all-linear")
    model: Any = classifier.model
    model.set_attn_implementation("sdpa")
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and name != "classifier"]
    setting = {"r": 16, "lora_alpha": 32, "target_modules": linear, "modules_to_save": ["classifier"]}
    classifier.model = peft.get_peft_model(model, peft.LoraConfig(**setting))
    return classifier


def fashion(num_clients: int, batch_size: int) -> Federation:
    return FashionMini(num_clients=num_clients).build(0)[1]


def noise_pictures(num_clients: int, batch_size: int) -> Federation:
    """Twice a batch for every client. What a step costs does not depend on what the pictures show."""
    random = torch.Generator().manual_seed(0)
    num = 2 * num_clients * batch_size
    return iid((torch.randn(num, 3, 32, 32, generator=random), torch.randint(100, (num,), generator=random)), num_clients)


class Workload(NamedTuple):
    """``ordinary``: the same model of the same weights, as the others train it, where that is another module."""

    build: Callable[[], nn.Module]
    federation: Callable[[int, int], Federation] = fashion
    ordinary: Callable[[], nn.Module] | None = None
    sizes: tuple[tuple[int, int], ...] = ((10, 32), (5, 16))


WORKLOADS = {
    "linear": Workload(linear),
    "mlp": Workload(mlp),
    "cnn": Workload(cnn),
    "transformer": Workload(SmallTransformer),
    "vit-tiny": Workload(vit_tiny, noise_pictures, partial(vit_tiny, ordinary=True), ((5, 16),)),
}


class Cohort(NamedTuple):
    """What all contestants are given: the model, one row of parameters and one batch per client."""

    model: FlatModel
    federation: Federation
    theta: Tensor
    examples: Records
    ordinary: nn.Module

    @property
    def num_clients(self) -> int:
        return len(self.theta)

    @property
    def batch_size(self) -> int:
        return self.examples["y"].shape[1]

    def engine(self, mechanism: Mechanism) -> SimulationEngine:
        """dpfed's own simulation of these clients, which also says how many of them it takes at once."""
        job = Job(self.model, self.federation, FedAvg(lr=LR, weight_decay=0.0), mechanism, seed=0)
        return Simulation(device="cpu").open(job)


def prepare(work: Workload, num_clients: int, batch_size: int) -> Cohort:
    federation = work.federation(num_clients, batch_size)
    if batch_size > min(federation.sizes):
        raise InputError(f"records: {batch_size} a client, but the smallest of them has {min(federation.sizes)}. Ask for less.")
    torch.manual_seed(0)
    model = FlatModel(work.build())
    theta = model.theta0() + 0.01 * torch.randn(num_clients, model.num_parameters)
    chosen = torch.stack([rows[:batch_size] for rows in federation.clients])
    examples = {name: column[chosen] for name, column in federation.records.items()}
    ordinary = model.module if work.ordinary is None else work.ordinary()
    ordinary.load_state_dict(model.module.state_dict())
    return Cohort(model, federation, theta, examples, ordinary)


def dpfed_step(cohort: Cohort, mechanism: Mechanism) -> Callable[[], Tensor]:
    """The cohort as a matrix, in chunks as the engine cuts them; returns the gradients of all clients."""
    theta, examples = cohort.theta.clone(), cohort.examples
    engine = cohort.engine(mechanism)
    clients_at_once, records_at_once, *_ = engine._plan(cohort.num_clients)
    chunks = [slice(low, low + clients_at_once) for low in range(0, cohort.num_clients, clients_at_once)]
    columns = [slice(low, low + records_at_once) for low in range(0, cohort.batch_size, records_at_once)]

    def gradient(rows: slice) -> Tensor:
        clients = range(cohort.num_clients)[rows]
        cut = [{name: column[rows, some] for name, column in examples.items()} for some in columns]
        parts = [Part(some, torch.ones_like(some["y"], dtype=torch.bool)) for some in cut]
        sizes = torch.full((len(clients), 1), float(cohort.batch_size))

        def noise(total: Tensor, std: Tensor | float, draw: int, query: int) -> Tensor:
            draws = [generator(0, "noise", 0, i, 0, draw, query) for i in clients]
            return total + std * torch.stack([torch.randn(theta.shape[1], generator=each) for each in draws])

        private = PrivateGradient(engine._sums, lambda draw: parts, noise, sizes, mechanism)(theta[rows])
        theta[rows] -= LR * private
        return private

    return lambda: torch.cat([gradient(rows) for rows in chunks])


def modules(cohort: Cohort) -> list[nn.Module]:
    """Every client's own copy of the module, with the client's parameters."""
    copies = [deepcopy(cohort.ordinary).train() for _ in range(cohort.num_clients)]
    for module, row in zip(copies, cohort.theta, strict=True):
        views = cohort.model.layout.views(row)
        with torch.no_grad():
            for name, view in views.items():
                module.get_parameter(name).copy_(view)
    return copies


def opacus_clients(cohort: Cohort) -> list[tuple[nn.Module, DPOptimizer]]:
    """A module with hooks and a private optimizer per client, so that no parameters have to be copied while it is timed."""
    hooked = [GradSampleModule(module) for module in modules(cohort)]
    size, noise = cohort.batch_size, {"noise_multiplier": SIGMA, "max_grad_norm": CLIP}
    return [(m, DPOptimizer(torch.optim.SGD(m.parameters(), LR), expected_batch_size=size, **noise)) for m in hooked]


def loop_step(cohort: Cohort, clients: list[tuple[nn.Module, torch.optim.Optimizer]]) -> Step:
    """Client after client: forward, backward, step. What is private about it, if anything, is the optimizer's business."""

    def step() -> None:
        for (module, optimizer), x, y in zip(clients, cohort.examples["x"], cohort.examples["y"], strict=True):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()

    return step


def plain_loop(cohort: Cohort) -> Step:
    return loop_step(cohort, [(m, torch.optim.SGD(m.parameters(), LR)) for m in modules(cohort)])


def engine_step(cohort: Cohort) -> Step:
    """A round of one local step by dpfed's engine itself: it draws Poisson batches, pads them, and averages the uploads."""
    mechanism = Gaussian(sigma=SIGMA, clip=CLIP, batch_size=cohort.batch_size)
    engine, layout, clients = cohort.engine(mechanism), cohort.model.layout, list(range(cohort.num_clients))
    s = engine.job.algorithm.server_init(cohort.theta[0], layout)
    rounds = iter(range(10**9))
    return lambda: engine.train(Round(next(rounds), 1.0, 1, layout), s, clients)


def check(cohort: Cohort) -> str:
    """Refuse to time contestants that do not compute the same thing."""
    silent = Gaussian(sigma=0.0, clip=CLIP, batch_size=cohort.batch_size, sampling="fixed")
    ours = dpfed_step(cohort, silent)() * cohort.batch_size
    theirs, norms = list[Tensor](), list[Tensor]()
    for (module, optimizer), x, y in zip(opacus_clients(cohort), cohort.examples["x"], cohort.examples["y"], strict=True):
        cross_entropy(module(x), y).backward()
        norms.append(torch.cat([p.grad_sample.flatten(1) for p in optimizer.params], dim=1).norm(dim=1))
        optimizer.clip_and_accumulate()
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        summed = {name.removeprefix("_module."): p.summed_grad for name, p in trained}
        theirs.append(cohort.model.layout.flatten(summed))
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
    if not error < 1e-5:
        raise SystemExit(f"dpfed and Opacus disagree: their clipped sums differ by {error:.1e} of their norm.")
    clipped = float((torch.cat(norms) > CLIP).double().mean())
    return f"clipped sums equal to {error:.0e} ({clipped:.0%} of the records are clipped)"


def matmul(size: int = 512) -> Callable[[], Tensor]:
    a, b = torch.randn(2, size, size)
    return lambda: a @ b


def matrix_flops(step: Step) -> int:
    """The floating-point operations of the matrix products of one step, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def take_turns(contestants: dict[str, Step], num_turns: int, clock: Callable[[], float]) -> dict[str, Tensor]:
    """Milliseconds of every turn of every contestant, one after the other; two turns to warm up are not counted."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-2, num_turns):
        for name, step in contestants.items():
            began = clock()
            step()
            if turn >= 0:
                taken[name].append(1000 * (clock() - began))
    return {name: torch.tensor(milliseconds) for name, milliseconds in taken.items()}


def quartiles(values: Tensor) -> tuple[float, float, float]:
    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return low, middle, high


def report(title: str, size: tuple[int, int], num_turns: int, clock: Callable[[], float]) -> None:
    cohort = prepare(WORKLOADS[title], *size)
    print(f"\n{title}: {size[0]} clients x {size[1]} records, d = {cohort.model.num_parameters:,}; {check(cohort)}", flush=True)
    private = Gaussian(sigma=SIGMA, clip=CLIP, batch_size=size[1], sampling="fixed")
    contestants: dict[str, Step] = {
        "(a) dpfed, private": dpfed_step(cohort, private),
        "(b) Opacus, client after client": loop_step(cohort, opacus_clients(cohort)),
        "(c) no privacy, client after client": plain_loop(cohort),
        "(d) dpfed's engine, Poisson batches": engine_step(cohort),
        "(e) dpfed without privacy": dpfed_step(cohort, Plain(batch_size=size[1])),
    }
    product = matmul()
    taken = take_turns(contestants | {"matrix product": product}, num_turns, clock)
    rate = matrix_flops(product) / quartiles(taken.pop("matrix product"))[1]
    floor = matrix_flops(plain_loop(cohort)) / rate
    print(f"| {'one step of the cohort':36} | {'ms':>8} | {'quartiles':>17} | {'/ (a)':>6} | {'quartiles':>13} |")
    print(f"|{'-' * 38}|{'-' * 10}|{'-' * 19}|{'-' * 8}|{'-' * 15}|")
    ours = taken["(a) dpfed, private"]
    for name, milliseconds in taken.items():
        low, middle, high = quartiles(milliseconds)
        least, ratio, most = quartiles(milliseconds / ours)
        spread, ratios = f"{low:.2f} to {high:.2f}", f"{least:.2f} to {most:.2f}"
        print(f"| {name:36} | {middle:8.2f} | {spread:>17} | {ratio:6.2f} | {ratios:>13} |")
    share = floor / quartiles(ours)[1]
    note = f"{rate / 1e6:.0f} GFLOP/s"
    print(f"| {f'floor: matrix products at {note}':36} | {floor:8.2f} | {'':17} | {share:6.2f} | {'':13} |", flush=True)


def processor() -> str:
    """The name of the CPU, where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def main(
    clients: tuple[int, ...] = (),
    records: tuple[int, ...] = (),
    workloads: tuple[str, ...] = tuple(WORKLOADS),
    repeat: int = 15,
    threads: int = 0,
    clock: Literal["wall", "cpu"] = "wall",
) -> None:
    """Time one private step of a cohort.

    Args:
        clients: clients of the cohort; one number for every size to be timed. None: what is usual for the workload.
        records: records of every client's batch; one number for every size to be timed.
        workloads: which of linear, mlp, cnn, transformer, vit-tiny.
        repeat: how many turns each contestant gets.
        threads: of torch; 0 leaves it to torch.
        clock: wall, or cpu for the CPU seconds of this process: steadier while others use the machine, fair with one thread.
    """
    unknown = set(workloads) - set(WORKLOADS)
    if unknown:
        raise InputError(f"workloads: {', '.join(sorted(unknown))} is not one of {', '.join(WORKLOADS)}. Choose from these.")
    if threads:
        torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
    machine = f"{processor()}, {torch.get_num_threads()} of {torch.multiprocessing.cpu_count()} cores used"
    print(f"{machine}; torch {torch.__version__}, Opacus {opacus.__version__}, float32")
    print(f"medians of {repeat} turns by the {clock} clock; ratios are medians of the ratios of the same turn")
    for name in workloads:
        for size in zip(clients, records, strict=True) if clients else WORKLOADS[name].sizes:
            report(name, size, repeat, {"wall": time.perf_counter, "cpu": time.process_time}[clock])


if __name__ == "__main__":
    tyro.cli(main)
