"""One private step of a cohort of large models on a GPU, beside Opacus, no privacy, and the floor; and whole runs.

What is timed is the product's own path: rounds of the simulation with K local steps of FedAvg, divided by K. Every workload
runs in a process of its own. All processes compile side by side; then one after the other has the GPU to itself: its steps are
timed and given back, then those of its peers. Each contestant does the same work: the gradients of every client's batch at the
client's own parameters, clipped per record, summed, noised, and one SGD step; "without privacy" the mean gradient and the step.
The clipped sums are compared, too: ours in bfloat16, as they are timed, with ours in float32 without any fast layer, factor or
compiler. A whole run is a process of its own at the very end, from its first import to its last row, whose programs were
compiled before on the same machine; or some rounds stand for all, and then the table says so.

    floor = floating-point operations of the matrix products of the same step without privacy / the measured rate of a product
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.workloads import RUNS, WORKLOADS, Lora, WholeRun, Workload, with_fast_lora
from dpfed import fast
from dpfed.algorithm import Round
from dpfed.algorithms import FedAdamW, FedAvg
from dpfed.data import Federation
from dpfed.engines.simulation import Job, Simulation, SimulationEngine
from dpfed.flat import FlatModel, Records
from dpfed.privacy import Gaussian, Mechanism, Plain, Sums
from dpfed.recipe import Recipe
from dpfed.rounds import begin

LR, CLIP, SIGMA, NUM_STEPS = 0.01, 0.1, 1.0, 5
Step = Callable[[], object]


def criterion(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), target)


class Cohort(NamedTuple):
    """A row of parameters and a batch for every client."""

    workload: Workload
    tiny: bool
    device: str
    backend: str
    theta: Tensor

    def module(self, attention: str, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return self.workload.build(attention, self.tiny).to(self.device, dtype)

    def examples(self, dtype: torch.dtype) -> Records:
        torch.manual_seed(1)
        return self.workload.examples(self.tiny, self.device, dtype)

    def model(self, attention: str) -> FlatModel:
        return FlatModel(with_fast_lora(self.module(attention, torch.float32)))

    def engine(self, mechanism: Mechanism, attention: str, algorithm: Any = None) -> SimulationEngine:
        """The product's own simulation, of clients whose records are their batch."""
        model, (num_clients, size) = self.model(attention), self.workload.shape(self.tiny)
        records = {name: column.flatten(0, 1) for name, column in self.examples(torch.float32).items()}
        federation = Federation(records, tuple(torch.arange(num_clients * size).split(size)))
        job = Job(model, federation, algorithm or FedAvg(lr=LR, weight_decay=0.0), mechanism, 0, cohort=num_clients)
        fast_way: dict[str, Any] = {"precision": "bfloat16", "compile": "yes"}
        return Simulation(self.device, self.workload.memory_gib, **fast_way).open(job, self.backend)


def prepare(workload: Workload, tiny: bool, device: str, backend: str) -> Cohort:
    blank = Cohort(workload, tiny, device, backend, torch.empty(0))
    theta0 = FlatModel(blank.module("sdpa", torch.float32)).theta0()
    torch.manual_seed(2)
    num_clients, _ = workload.shape(tiny)
    return blank._replace(theta=theta0 + 0.01 * torch.randn(num_clients, len(theta0), device=device))


def rounds_of(engine: SimulationEngine, graphs: bool | None = None) -> Step:
    """A round of all clients; ``graphs``: with CUDA graphs or without, whatever the engine would choose."""
    job, compiler = engine.job, engine._compiler
    if graphs is not None and compiler is not None:
        compiler.graphs = graphs
    s = job.algorithm.server_init(job.model.theta0(), job.model.layout)
    clients, numbers = list(range(len(job.federation.clients))), iter(range(10**9))
    return lambda: engine.train(Round(next(numbers), 1.0, NUM_STEPS, job.model.layout), s, clients)


def inputs(examples: Records) -> tuple[Tensor, ...]:
    return tuple(column for name, column in examples.items() if name != "y")


def copies(cohort: Cohort, dtype: torch.dtype) -> list[nn.Module]:
    """Every client's own module at the client's parameters, with the fused attention that the peers know."""
    modules = []
    first = cohort.module("sdpa", dtype).train()
    layout = FlatModel(deepcopy(first)).layout
    shared = {id(p): p for p in first.parameters() if not p.requires_grad}
    for row in cohort.theta:
        module = deepcopy(first, dict(shared))
        views = layout.views(row)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(views[name])
        modules.append(module)
    return modules


def opacus_clients(cohort: Cohort, dtype: torch.dtype, ghost: bool = False) -> tuple[list[tuple[nn.Module, Any]], list[Any]]:
    """Every client's module and optimizer, and its criterion. ``ghost``: norms first, then a second backward pass."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    size = cohort.examples(dtype)["y"].shape[1]
    pairs, criteria, facts = [], list[Any](), {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "expected_batch_size": size}
    for module in copies(cohort, dtype):
        for part in module.modules():
            if isinstance(part, Lora):
                part.num_records = size
        ghostly: dict[str, Any] = {"use_ghost_clipping": True, "max_grad_norm": CLIP}
        hooked = GradSampleModuleFastGradientClipping(module, **ghostly) if ghost else GradSampleModule(module)
        inner = torch.optim.SGD([p for p in hooked.parameters() if p.requires_grad], LR)
        optimizer = (DPOptimizerFastGradientClipping if ghost else DPOptimizer)(inner, **facts)
        criteria.append(DPLossFastGradientClipping(hooked, optimizer, nn.CrossEntropyLoss()) if ghost else criterion)
        pairs.append((hooked, optimizer))
    return pairs, criteria


def loop(clients: list[tuple[nn.Module, Any]], examples: Records, criteria: list[Any] | None = None) -> Step:
    def step() -> None:
        for i, (module, optimizer) in enumerate(clients):
            optimizer.zero_grad()
            columns = [column[i] for column in inputs(examples)]
            (criteria[i] if criteria else criterion)(module(*columns), examples["y"][i]).backward()
            optimizer.step()

    return step


def eager_loop(cohort: Cohort, examples: Records) -> Step:
    modules = copies(cohort, torch.bfloat16)
    pairs = [(m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], LR, fused=True)) for m in modules]
    return loop(pairs, examples)


def compiled_loop(cohort: Cohort, examples: Records, backend: str) -> Step:
    """One compiled module takes the parameters of client after client, without a copy."""
    modules = copies(cohort, torch.bfloat16)
    own = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    values, forward = [[p.data for p in some] for some in own], torch.compile(modules[0], dynamic=False, backend=backend)
    optimizer = torch.optim.SGD(own[0], LR, fused=True)
    one = [loop([(forward, optimizer)], {n: c[i : i + 1] for n, c in examples.items()}) for i in range(len(modules))]

    def step() -> None:
        for mine, run in zip(values, one, strict=True):
            for parameter, value in zip(own[0], mine, strict=True):
                parameter.data = value
            run()

    return step


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(steps: dict[str, Step], device: str, seconds: float, least: int = 5, warm: int = 2) -> dict[str, list[float]]:
    """Milliseconds of every turn, after some that warm up; the contestants take turns until the time is over."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    began = time.monotonic()
    for turn in range(-warm, 50):
        if turn >= least and time.monotonic() - began > seconds:
            break
        for name, step in steps.items():
            wait(device)
            since = time.perf_counter()
            step()
            wait(device)
            if turn >= 0:
                taken[name].append(1000 * (time.perf_counter() - since))
    return taken


def say(**what: Any) -> None:
    print("@" + json.dumps(what), flush=True)


class Contestants:
    """Steps that have run once; one that fails is reported and left out, and none is begun after the deadline."""

    def __init__(self, deadline: float, device: str) -> None:
        self.deadline, self.device, self.steps, self.notes = deadline, device, dict[str, Step](), dict[str, Any]()
        self.taken: dict[str, list[float]] = {}

    def add(self, name: str, make: Callable[[], Step]) -> Step | None:
        if time.time() > self.deadline:
            self.notes[name] = "left out: no time"
            return None
        began = time.monotonic()
        try:
            step = make()
            step()
            wait(self.device)
        except Exception as error:
            traceback.print_exc()
            self.notes[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
            return None
        finally:
            self.give_back()
        self.notes[f"first call of {name}, s"] = round(time.monotonic() - began, 1)
        self.steps[name] = step
        return step

    def time(self, seconds: float, num_steps: int = 1, **limits: int) -> None:
        """``num_steps``: of the cohort, in one call. What was timed is forgotten."""
        for name, values in timed(self.steps, self.device, seconds, **limits).items():
            self.taken[name] = [value / num_steps for value in values]
        self.steps.clear()
        self.give_back()

    def give_back(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def errors(cohort: Cohort, engine: SimulationEngine, notes: dict[str, Any]) -> None:
    """How far the sums that are timed are from those in float32, without any fast layer, factor or compiler."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    single = cohort.examples(torch.float32)
    mask = torch.ones_like(single["y"], dtype=torch.bool)
    half = engine.job.model.in_dtype(single, torch.bfloat16)
    found, norms = engine._sums.clipped([(1.0, cohort.theta)], half, mask, CLIP)
    plain, expected, lengths = Sums(FlatModel(cohort.module("eager", torch.float32))), list[Tensor](), list[Tensor]()
    for start in range(0, mask.shape[1], 5):
        few = {name: column[:1, start : start + 5] for name, column in single.items()}
        total, some = plain.clipped([(1.0, cohort.theta[:1])], few, mask[:1, start : start + 5], CLIP)
        expected.append(total), lengths.append(some)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    notes["error of the sum"] = relative(found[:1], torch.stack(expected).sum(0))
    notes["error of the norms"] = relative(norms[:1], torch.cat(lengths, 1))


def attention_error(device: str, dtype: torch.dtype, kind: str) -> float:
    """How far a fused kernel is from the definition in float64, the gradients of query, key and value included."""
    torch.manual_seed(0)
    given = [torch.randn(3, 49, 4, 32, device=device).to(dtype) for _ in range(4)]
    bias = torch.randn(3, 1, 49, 49, device=device).to(dtype) if kind == "mask" else None
    hidden = torch.ones(49, 49, dtype=torch.bool, device=device).triu(1)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT / 32**0.5 + (0 if bias is None else bias.double())
        return (scores.masked_fill(hidden & (kind == "causal"), -torch.inf).softmax(-1) @ v).transpose(1, 2)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fast.attention(q, k, v, bias, causal=kind == "causal")

    def results(attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        out, back = torch.func.vjp(attend, *inputs[:3])
        return torch.stack([out, *back(inputs[3])])

    return relative(results(ours, *given), results(definition, *(x.double() for x in given)))


def attention_errors(device: str) -> dict[str, float]:
    kinds = [(dtype, kind) for dtype in (torch.float32, torch.bfloat16) for kind in ("no mask", "mask", "causal")]
    return {f"error of attention, {dtype}, {kind}": attention_error(device, dtype, kind) for dtype, kind in kinds}


def child(name: str, tiny: bool, device: str, deadline: float, seconds: float, backend: str) -> None:
    """Warm up, say so, wait for the word, time, report."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    warnings.simplefilter("ignore")
    fast.register()
    (whole_run if name in RUNS else one_step)(name, tiny, device, deadline, seconds, backend)


def whole_run(name: str, tiny: bool, device: str, deadline: float, seconds: float, backend: str) -> None:
    """A run, by dpfed's own loop, the ledger and the record included; of a long one some rounds."""
    planned: WholeRun = RUNS[name]
    workload, notes = WORKLOADS[planned.workload], dict[str, Any]()
    torch.manual_seed(0)
    num_clients, size = workload.shape(tiny)
    records = workload.examples(tiny, "cpu", torch.float32, planned.num_records // (10 if tiny else 1))
    clients = tuple(torch.arange(records["y"].numel()).split(records["y"].shape[1]))
    federation = Federation({column: values.flatten(0, 1) for column, values in records.items()}, clients)

    class Random:
        def build(self, seed: int) -> tuple[FlatModel, Federation]:
            return FlatModel(with_fast_lora(workload.build("dpfed", tiny))), federation

    engine = Simulation(device, workload.memory_gib, precision="bfloat16", compile="yes")
    mechanism = Gaussian(sigma=SIGMA, clip=CLIP, batch_size=size, sampling="fixed")
    rounds, steps = (5, 2) if tiny else (planned.timed_rounds, planned.local_steps)
    recipe = Recipe(Random(), FedAdamW(), mechanism, rounds, steps, num_clients, evaluate_every=rounds, engine=engine)
    with tempfile.TemporaryDirectory() as folder:
        record, rows = begin(recipe, Path(folder) / "run", engine=lambda job: engine.open(job, backend))
        notes["engine"], every = record.environment["engine"], list(rows)
    notes["start-up, s"] = sum(row.get("startup_seconds", 0.0) for row in every)
    notes["problems"] = [note for row in every for note in row.get("notes", ())]
    each = [row["seconds"] - row.get("startup_seconds", 0.0) for row in every]
    alive = time.time() - float(os.environ["BEGAN"])
    notes["the process, s"] = round(alive, 1)
    if planned.timed_rounds < planned.rounds:
        notes[f"whole run by {rounds} rounds, s"] = round(alive + (planned.rounds - rounds) * median(each), 1)
    notes["cohort"], notes["rounds x steps"] = f"{num_clients}x{size}", f"{planned.rounds}x{planned.local_steps}"
    if device == "cuda":
        notes["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    say(result=name, taken={"a round of the run": [1000 * value for value in each]}, notes=notes, profile="")


def one_step(name: str, tiny: bool, device: str, deadline: float, seconds: float, backend: str) -> None:
    """Compile ours and say so; after the word, time ours, then the peers; report."""
    half, workload = torch.bfloat16, WORKLOADS[name]
    cohort = prepare(workload, tiny, device, backend)
    found, peers, size = Contestants(deadline, device), Contestants(deadline, device), workload.shape(tiny)[1]
    full, private = name in ("resnet-18", "vit-base, all"), Gaussian(sigma=SIGMA, clip=CLIP, batch_size=size, sampling="fixed")
    mechanisms: dict[str, Mechanism] = {"private": private, "no privacy": Plain(batch_size=size)}
    engines = {title: cohort.engine(mechanism, "dpfed") for title, mechanism in mechanisms.items()}
    notes, engine = found.notes, engines["private"]
    notes["d"], notes["cohort"] = engine.job.model.num_parameters, f"{len(cohort.theta)}x{size}"
    notes["engine"] = engine.description
    for title, one in engines.items():
        found.add(f"dpfed, {title}", lambda one=one: rounds_of(one, False))
        notes[f"start-up, {title}, s"] = round(one.startup_seconds, 1)
    if device == "cuda":
        notes["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    examples, single = cohort.examples(half), cohort.examples(torch.float32)
    peers.add("no privacy, client after client, compiled", lambda: compiled_loop(cohort, examples, backend))
    say(ready=name)
    sys.stdin.readline()
    found.deadline = peers.deadline = time.time() + 5 * seconds
    if name == "vit-base, all":  # with all that an algorithm keeps
        heavy = cohort.engine(private, "dpfed", FedAdamW())
        found.add("dpfed, private, FedAdamW", lambda: rounds_of(heavy, False))
        if device == "cuda":
            notes["peak GiB, FedAdamW"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    try:
        notes.update(attention_errors(device))
        errors(cohort, engine, notes)
    except Exception as error:
        traceback.print_exc()
        notes["errors"] = f"failed: {type(error).__name__}: {str(error)[:300]}"
    if device == "cuda" and not full:
        for title, mechanism in mechanisms.items():
            if f"dpfed, {title}" not in found.steps:
                continue  # what was not compiled in time is not compiled now
            graphed = cohort.engine(mechanism, "dpfed")
            found.add(f"dpfed, {title}, CUDA graph", lambda graphed=graphed: rounds_of(graphed, True))
            notes["problems"] = notes.get("problems", []) + graphed.notes
    notes["problems"] = notes.get("problems", []) + engine.notes
    lines = profile_lines(name, found.steps, device) if device == "cuda" else ""
    found.time(seconds / 3, NUM_STEPS)
    engines.clear()

    def opacus(dtype: torch.dtype, ghost: bool = False) -> Step:
        pairs, criteria = opacus_clients(cohort, dtype, ghost)
        return loop(pairs, examples if dtype == half else single, criteria)

    eager = peers.add("no privacy, client after client", lambda: eager_loop(cohort, examples))
    if eager is not None:
        with FlopCounterMode(display=False) as counter:
            eager()
        notes["flops"] = counter.get_total_flops()
    peers.add("Opacus, bfloat16", lambda: opacus(half))
    peers.time(seconds / 3, least=3, warm=1)
    peers.add("Opacus, tf32", lambda: opacus(torch.float32))
    peers.time(seconds / 3, least=3, warm=1)
    if full:
        peers.add("Opacus, ghost, tf32", lambda: opacus(torch.float32, ghost=True))
        peers.time(seconds / 3, least=3, warm=1)
    say(result=name, taken=found.taken | peers.taken, notes=peers.notes | notes, profile=lines)


def profile_lines(name: str, steps: dict[str, Step], device: str) -> str:
    """Where the time of a step goes on the device."""
    from torch.profiler import ProfilerActivity, profile

    lines = []
    for which in ("dpfed, private", "dpfed, no privacy"):
        if which in steps:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                steps[which]()
                wait(device)
            rows = [e for e in seen.key_averages() if e.self_device_time_total > 0]
            rows.sort(key=lambda e: -e.self_device_time_total)
            total = sum(e.self_device_time_total for e in rows) / (1000 * NUM_STEPS)
            count = sum(e.count for e in rows) // NUM_STEPS
            lines.append(f"\n== {name}: {which}: {total:.2f} ms on the device a step, {count} launches")
            lines += [
                f"{e.self_device_time_total / (1000 * NUM_STEPS):8.3f} ms {e.count // NUM_STEPS:5d} x  {e.key[:150]}"
                for e in rows[:45]
            ]
    return "\n".join(lines)


def matmul_rate(device: str, size: int) -> float:
    """FLOP/s of a large product of random bfloat16 matrices; the median of ten."""
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    times = timed({"product": lambda: a @ b}, device, 2.0)["product"]
    return 2 * size**3 / (median(times) / 1000)


def table(results: dict[str, Any], rate: float) -> str:
    lines = ["| workload | cohort, d | contestant | ms | / dpfed private | / floor |", "|---|---|---|---|---|---|"]
    for name, result in results.items():
        medians = {n: median(values) for n, values in result["taken"].items()}
        private = [n for n in medians if n in ("dpfed, private", "dpfed, private, CUDA graph")]
        if not private:
            lines.append(f"| {name} | {result['notes']['cohort']} | {[f'{n}: {m:.0f} ms' for n, m in medians.items()]} | | | |")
            lines.append(f"  {result['notes']}")
            continue
        best, floor = min(medians[n] for n in private), 1000 * result["notes"].get("flops", 0) / rate
        where = f"{result['notes']['cohort']}, {result['notes']['d']:,}"
        for n, milliseconds in medians.items():
            over = f"{milliseconds / floor:.2f}" if floor else "?"
            lines.append(f"| {name} | {where} | {n} | {milliseconds:.2f} | {milliseconds / best:.2f} | {over} |")
        lines.append(f"| {name} | {where} | floor | {floor:.2f} | {floor / best:.2f} | 1 |")
        problems = {
            k: v
            for k, v in result["notes"].items()
            if k.startswith(("error of the", "peak", "engine", "start-up", "problems")) or "fail" in str(v) or "left" in str(v)
        }
        lines.append(f"  {problems}")
    return "\n".join(lines)


def main(
    workloads: tuple[str, ...] = (*WORKLOADS, *RUNS),
    warm_seconds: float = 240.0,
    seconds: float = 8.0,
    out: Path = Path("."),
    tiny: bool = False,
    device: str = "cuda",
    backend: str = "inductor",
    only: str = "",
    deadline: float = 0.0,
) -> None:
    """Time one step of every workload, and whole runs.

    Args:
        workloads: which ones.
        warm_seconds: nothing begins to compile later than this.
        seconds: for timing the contestants of each workload, a third of it for ours.
        out: the folder for results.json, table.md, profile.txt and log.txt.
        tiny: two layers of every model, two clients of three records: tries the benchmark itself.
        device: cuda or cpu.
        backend: of torch.compile; aot_eager tries everything but the kernels.
        only: used by the benchmark for its own processes, as is deadline.
        deadline: see only.
    """
    if only:
        return child(only, tiny, device, deadline, seconds, backend)
    began, deadline = time.time(), time.time() + warm_seconds
    out.mkdir(parents=True, exist_ok=True)
    log = (out / "log.txt").open("w")
    settings = ["--deadline", str(deadline), "--seconds", str(seconds), "--device", device, "--backend", backend]
    settings += ["--tiny"] if tiny else []

    def start(name: str, threads: int) -> subprocess.Popen[str]:
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), "BEGAN": str(time.time())}
        command = [sys.executable, "-u", "-m", "benchmarks.gpu_step", "--only", name, *settings]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)

    results: dict[str, Any] = {}
    profiles: list[str] = []

    def take(name: str, result: dict[str, Any] | None) -> None:
        if result is None:
            print(f"{name}: died; see log.txt", flush=True)
            return
        profiles.append(result.pop("profile"))
        results[name] = result
        (out / "results.json").write_text(json.dumps({"rate": rate, "results": results}, indent=1))
        (out / "profile.txt").write_text("\n".join(profiles))
        (out / "table.md").write_text(table(results, rate))
        print(f"{name} done at {time.time() - began:.0f} s", flush=True)

    side_by_side = {name: start(name, 2) for name in workloads if name in WORKLOADS}
    heard = {name: hear(process) for name, process in side_by_side.items()}
    ready = {name: next(heard[name], None) for name in side_by_side}
    print(f"compiled after {time.time() - began:.0f} s: {[n for n, r in ready.items() if r]}", flush=True)
    rate = matmul_rate(device, 512 if device == "cpu" else 8192)
    for name, process in side_by_side.items():
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("go\n")
            process.stdin.flush()
        take(name, next(heard[name], None))
        process.wait()
    for name in workloads:
        if name in RUNS:
            process = start(name, os.cpu_count() or 1)
            take(name, next(hear(process), None))
            process.wait()
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{machine}, torch {torch.__version__}; a bfloat16 product runs at {rate / 1e12:.0f} TFLOP/s; medians")
    print(table(results, rate))


def hear(process: subprocess.Popen[str]) -> Any:
    for line in process.stdout or ():
        if line.startswith("@"):
            yield json.loads(line[1:])
        else:
            print(line, end="", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
