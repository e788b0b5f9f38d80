"""One private step of a cohort of large models on a GPU, beside Opacus, the same without privacy, and the floor.

Every workload runs in a process of its own. All processes compile and warm up side by side; then they are timed one at a
time, so that nothing else runs on the GPU. Each contestant does the same work: the gradients of every client's batch at the
client's own parameters, clipped per record, summed, noised, and one SGD step; "without privacy" the mean gradient and the step.
Before anything is timed, the clipped sums are compared: ours in bfloat16 and in float32 with the reference (float32, plain
attention and convolutions), and Opacus with the reference.

    floor = floating-point operations of the matrix products of the same step without privacy / the measured rate of a product
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.workloads import WORKLOADS, Lora, Workload, with_fast_lora
from dpfed import fast
from dpfed.data import generator
from dpfed.flat import FlatModel, Records
from dpfed.privacy import clipped_sum

LR, CLIP, SIGMA = 0.01, 0.1, 1.0
Step = Callable[[], object]


def criterion(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), target)


class Cohort(NamedTuple):
    """A row of parameters and a batch for every client."""

    workload: Workload
    tiny: bool
    device: str
    theta: Tensor
    seed: int = 0

    def module(self, attention: str, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return self.workload.build(attention, self.tiny).to(self.device, dtype)

    def examples(self, dtype: torch.dtype) -> Records:
        torch.manual_seed(1)
        return self.workload.examples(self.tiny, self.device, dtype)

    def flat(self, attention: str, dtype: torch.dtype, patches: bool) -> FlatModel:
        module = self.module(attention, dtype)
        return FlatModel(with_fast_lora(fast.with_patches(module)) if patches else module, criterion)


def prepare(workload: Workload, tiny: bool, device: str) -> Cohort:
    blank = Cohort(workload, tiny, device, torch.empty(0))
    theta0 = blank.flat("sdpa", torch.float32, False).theta0()
    num_clients = len(blank.examples(torch.float32)["y"])
    torch.manual_seed(2)
    return blank._replace(theta=theta0 + 0.01 * torch.randn(num_clients, len(theta0), device=device))


def inputs(examples: Records) -> tuple[Tensor, ...]:
    return tuple(column for name, column in examples.items() if name != "y")


def loss_of_views(model: FlatModel, weights: Records, example: Records) -> Tensor:
    named = {name: column.unsqueeze(0) for name, column in example.items() if name != "y"}
    return criterion(functional_call(model.module, weights, (), named), example["y"].unsqueeze(0))


def private_sum(model: FlatModel, theta: Tensor, examples: Records) -> Tensor:
    """The clipped sum tensor by tensor: gradients in the model's precision, norms and sums in float32."""
    weights = model.layout.aligned(theta)
    grads = vmap(vmap(grad(lambda w, e: loss_of_views(model, w, e)), in_dims=(None, 0)))(weights, examples)
    flat = [grads[part.name].flatten(2) for part in model.layout.parts]
    norms = torch.stack([g.float().square().sum(-1) for g in flat]).sum(0).sqrt()
    usable = norms.isfinite()
    scale = torch.where(usable, (CLIP / norms).clamp(max=1), 0)
    return torch.cat([torch.where(usable[..., None], g * scale[..., None], 0).sum(1) for g in flat], -1)


def flat_sum(model: FlatModel, theta: Tensor, examples: Records) -> Tensor:
    """The same as ``private_sum`` with the gradients as rows of one matrix."""
    grads = vmap(vmap(grad(model.loss), in_dims=(None, 0)))(theta, examples)
    norms = grads.float().square().sum(-1).sqrt()
    usable = norms.isfinite()
    scale = torch.where(usable, (CLIP / norms).clamp(max=1), 0)
    return torch.where(usable[..., None], grads * scale[..., None], 0).sum(1)


class _Probed(torch.autograd.Function):
    """A linear layer whose weight has no gradient; that of the ``probe`` is the squared norm of what it would have been.

    The gradient of one record is  G = g' x  with g [T, out] and x [T, in]. Its squared norm is  |G|^2 = sum(x x' * g g'):
    whichever side is smaller is computed (Goodfellow, 2015, arXiv 1510.01799; Li et al., 2021, arXiv 2110.05679).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, probe: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, Tensor]:
        x, weight = ctx.saved_tensors
        length, (outside, inside) = x.shape[-2], weight.shape
        if length * length < outside * inside:
            squares = (x @ x.transpose(-1, -2)).float() * (g @ g.transpose(-1, -2)).float()
        else:
            squares = (g.transpose(-1, -2) @ x).float().square()
        return g @ weight, None, squares.sum()


@torch.compiler.allow_in_graph
def _probed(x: Tensor, weight: Tensor, probe: Tensor) -> Tensor:
    return _Probed.apply(x, weight, probe)


class Probed(fast.PatchConv2d):
    """A convolution by patches that measures its weight's gradient instead of taking it."""

    def _product(self, patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = _probed(patches.flatten(1, 2), weight, self.probe).unflatten(1, patches.shape[1:3])
        return out if bias is None else out + bias


def probed(module: nn.Module) -> nn.Module:
    for part in fast.with_patches(module).modules():
        if isinstance(part, fast.PatchConv2d):
            part.__class__ = Probed
            part.register_parameter("probe", nn.Parameter(torch.zeros((), device=part.weight.device), requires_grad=False))
    return module


def norms_first_sum(model: FlatModel, measured: nn.Module, theta: Tensor, examples: Records) -> Tensor:
    """First every record's norm, without the gradients of large weights; then one backward pass of the weighted losses."""
    weights = model.layout.aligned(theta)
    layers = [name for name, part in measured.named_modules() if isinstance(part, Probed)]
    large = {f"{name}.weight": weights[f"{name}.weight"] for name in layers}
    small = {name: value for name, value in weights.items() if name not in large}

    def loss(small: Records, probe: Tensor, large: Records, example: Records) -> Tensor:
        probes = {f"{name}.probe": probe for name in layers}
        named = {name: column.unsqueeze(0) for name, column in example.items() if name != "y"}
        return criterion(functional_call(measured, small | large | probes, (), named), example["y"].unsqueeze(0))

    per_record = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, None, None, 0))
    grads, squares = vmap(per_record, in_dims=(0, None, 0, 0))(small, theta.new_zeros((), dtype=torch.float32), large, examples)
    norms = (squares + torch.stack([g.flatten(2).float().square().sum(-1) for g in grads.values()]).sum(0)).sqrt()
    scale = torch.where(norms.isfinite(), (CLIP / norms).clamp(max=1), 0)

    def total(weights: Records, examples: Records, scale: Tensor) -> Tensor:
        return (vmap(lambda e: loss_of_views(model, weights, e))(examples) * scale).sum()

    sums = vmap(grad(total))(weights, examples, scale)
    return torch.cat([sums[part.name].flatten(1).float() for part in model.layout.parts], -1)


def plain_sum(model: FlatModel, theta: Tensor, examples: Records) -> Tensor:
    def total(weights: Records, examples: Records) -> Tensor:
        return vmap(lambda e: loss_of_views(model, weights, e))(examples).sum()

    grads = vmap(grad(total))(model.layout.aligned(theta), examples)
    return torch.cat([grads[part.name].flatten(1).float() for part in model.layout.parts], -1)


Sum = Callable[[Tensor, Records], Tensor]


def compiled(
    function: Callable[[FlatModel, Tensor, Records], Tensor], model: FlatModel, dtype: torch.dtype, backend: str
) -> Sum:
    def total(theta: Tensor, examples: Records) -> Tensor:
        with torch.no_grad():
            return function(model, theta.to(dtype), examples)

    return torch.compile(total, fullgraph=True, dynamic=False, backend=backend)


def step_of(total: Sum, cohort: Cohort, examples: Records, private: bool) -> Step:
    """Gradient, keyed noise, step; what the engine does around the compiled sum."""
    theta, size = cohort.theta.clone(), examples["y"].shape[1]
    numbers = iter(range(10**9))

    def step() -> None:
        gradient = total(theta, examples)
        if private:
            t = next(numbers)
            draws = [generator(0, "noise", t, i, 0, 0, 0, device=theta.device) for i in range(len(theta))]
            noise = torch.stack([torch.randn(theta.shape[1], generator=draw, device=theta.device) for draw in draws])
            gradient = gradient + SIGMA * CLIP * noise
        theta.sub_(gradient / size, alpha=LR)

    return step


def graphed(total: Sum, cohort: Cohort, examples: Records) -> Sum:
    """The compiled sum as a CUDA graph: one launch instead of thousands."""
    theta = cohort.theta.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            total(theta, examples)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = total(theta, examples)

    def replay(now: Tensor, examples: Records) -> Tensor:
        theta.copy_(now)
        graph.replay()
        return out

    return replay


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


def opacus_clients(cohort: Cohort, dtype: torch.dtype, sigma: float = SIGMA) -> list[tuple[nn.Module, Any]]:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    size = cohort.examples(dtype)["y"].shape[1]
    pairs = []
    for module in copies(cohort, dtype):
        for part in module.modules():
            if isinstance(part, Lora):
                part.num_records = size
        hooked = GradSampleModule(module)
        inner = torch.optim.SGD([p for p in hooked.parameters() if p.requires_grad], LR)
        pairs.append((hooked, DPOptimizer(inner, noise_multiplier=sigma, max_grad_norm=CLIP, expected_batch_size=size)))
    return pairs


def loop(clients: list[tuple[nn.Module, Any]], examples: Records) -> Step:
    def step() -> None:
        for i, (module, optimizer) in enumerate(clients):
            optimizer.zero_grad()
            columns = [column[i] for column in inputs(examples)]
            criterion(module(*columns), examples["y"][i]).backward()
            optimizer.step()

    return step


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(steps: dict[str, Step], device: str, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every turn; the contestants take turns until the time is over, at least five times, at most fifty."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    began = time.monotonic()
    for turn in range(-2, 50):
        if turn >= 5 and time.monotonic() - began > seconds:
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


class Warm:
    """Contestants that have run once; one that fails is reported and left out, and none is begun after the deadline."""

    def __init__(self, deadline: float, device: str) -> None:
        self.deadline, self.device, self.steps, self.notes = deadline, device, dict[str, Step](), dict[str, Any]()

    def add(self, name: str, make: Callable[[], Step]) -> Step | None:
        if time.time() > self.deadline:
            self.notes[name] = "left out: no time"
            return None
        began = time.monotonic()
        try:
            step = make()
            step(), step()
            wait(self.device)
        except Exception as error:
            traceback.print_exc()
            self.notes[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
            return None
        finally:
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
        self.notes[f"warm-up of {name}, s"] = round(time.monotonic() - began, 1)
        self.steps[name] = step
        return step


def errors(cohort: Cohort, totals: dict[str, Sum], notes: dict[str, Any]) -> None:
    """How far the fast sums, and Opacus, are from the reference."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    single = cohort.examples(torch.float32)
    plain = cohort.flat("eager", torch.float32, False)
    fused = cohort.flat("dpfed", torch.float32, True)
    some = slice(0, 2)
    few = {name: column[some, :4] for name, column in single.items()}
    mask = torch.ones_like(few["y"], dtype=torch.bool)
    expected, _ = clipped_sum(plain.loss, [(1.0, cohort.theta[some])], few, mask, CLIP)
    with torch.no_grad():
        notes["error of float32, fast layers"] = relative(private_sum(fused, cohort.theta[some], few), expected)
        rows = [(row[None], {n: c[i : i + 1] for n, c in single.items()}) for i, row in enumerate(cohort.theta)]
        whole = torch.cat([private_sum(fused, *row) for row in rows])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name, total in totals.items():
        notes[f"error of bfloat16, {name}"] = relative(total(cohort.theta, cohort.examples(torch.bfloat16)), whole)


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
    half, workload = torch.bfloat16, WORKLOADS[name]
    cohort = prepare(workload, tiny, device)
    warm, examples = Warm(deadline, device), cohort.examples(half)
    attention = "dpfed"
    try:
        warm.notes |= attention_errors(device)
    except Exception as error:
        traceback.print_exc()
        attention, warm.notes["attention"] = "eager", f"failed: {type(error).__name__}: {str(error)[:300]}"
    model = cohort.flat(attention, half, True)
    warm.notes["d"], warm.notes["cohort"] = model.num_parameters, f"{len(cohort.theta)}x{examples['y'].shape[1]}"
    ours, plain = compiled(private_sum, model, half, backend), compiled(plain_sum, model, half, backend)
    totals = {"gradients": ours}
    warm.add("dpfed, private", lambda: step_of(ours, cohort, examples, True))
    warm.add("dpfed, no privacy", lambda: step_of(plain, cohort, examples, False))
    if device == "cuda" and name != "resnet-18":  # whose graphs would hold too much memory beside the others'
        if "dpfed, private" in warm.steps:
            warm.add("dpfed, private, CUDA graph", lambda: step_of(graphed(ours, cohort, examples), cohort, examples, True))
        if "dpfed, no privacy" in warm.steps:
            warm.add(
                "dpfed, no privacy, CUDA graph", lambda: step_of(graphed(plain, cohort, examples), cohort, examples, False)
            )
    if name == "resnet-18":
        measured = probed(cohort.module("dpfed", half))
        first = compiled(lambda m, theta, e: norms_first_sum(m, measured, theta, e), model, half, backend)
        if warm.add("dpfed, private, norms first", lambda: step_of(first, cohort, examples, True)) is not None:
            totals["norms first"] = first
    warm.add("Opacus, bfloat16", lambda: loop(opacus_clients(cohort, half), examples))
    single = cohort.examples(torch.float32)
    warm.add("Opacus, tf32", lambda: loop(opacus_clients(cohort, torch.float32), single))

    def bare() -> Step:
        modules = copies(cohort, half)
        pairs = [(m, torch.optim.SGD([p for p in m.parameters() if p.requires_grad], LR, fused=True)) for m in modules]
        return loop(pairs, examples)

    def bare_compiled() -> Step:
        modules = copies(cohort, half)
        own = [[p for p in module.parameters() if p.requires_grad] for module in modules]
        values, forward = [[p.data for p in some] for some in own], torch.compile(modules[0], dynamic=False, backend=backend)
        optimizer = torch.optim.SGD(own[0], LR, fused=True)
        one = [loop([(forward, optimizer)], {n: c[i : i + 1] for n, c in examples.items()}) for i in range(len(modules))]

        def step() -> None:  # one compiled module takes the parameters of client after client, without a copy
            for mine, run in zip(values, one, strict=True):
                for parameter, value in zip(own[0], mine, strict=True):
                    parameter.data = value
                run()

        return step

    eager = warm.add("no privacy, client after client", bare)
    if eager is not None:
        with FlopCounterMode(display=False) as counter:
            eager()
        warm.notes["flops"] = counter.get_total_flops()
    warm.add("no privacy, client after client, compiled", bare_compiled)
    if time.time() < deadline + 20 and "dpfed, private" in warm.steps:
        try:
            errors(cohort, totals, warm.notes)
        except Exception as error:
            traceback.print_exc()
            warm.notes["errors"] = f"failed: {type(error).__name__}: {str(error)[:300]}"
    if name == "vit-base":  # what the parts of the fast path contribute
        flat = compiled(flat_sum, model, half, backend)
        warm.add("dpfed, private, one flat vector", lambda: step_of(flat, cohort, examples, True))
        eager_attention = compiled(private_sum, cohort.flat("eager", half, True), half, backend)
        warm.add("dpfed, private, plain attention", lambda: step_of(eager_attention, cohort, examples, True))
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    say(ready=name)
    sys.stdin.readline()
    slow = {n: s for n, s in warm.steps.items() if n.startswith(("Opacus", "no privacy"))}
    quick = {n: s for n, s in warm.steps.items() if n not in slow}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = timed(quick, device, seconds / 2)
    if device == "cuda":
        warm.notes["peak GiB, dpfed"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    taken |= timed(slow, device, seconds / 2)
    lines = profile_lines(name, warm.steps, device) if device == "cuda" else ""
    say(result=name, taken=taken, notes=warm.notes, profile=lines)


def profile_lines(name: str, steps: dict[str, Step], device: str) -> str:
    from torch.profiler import ProfilerActivity, profile

    found = []
    for which in ("dpfed, private", "dpfed, no privacy", "dpfed, private, norms first"):
        if which in steps:
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
                for _ in range(3):
                    steps[which]()
                wait(device)
            rows = [e for e in seen.key_averages() if e.self_device_time_total > 0]
            rows.sort(key=lambda e: -e.self_device_time_total)
            total = sum(e.self_device_time_total for e in rows) / 3000
            found.append(
                f"\n== {name}: {which}: {total:.2f} ms on the device a step, {sum(e.count for e in rows) // 3} launches"
            )
            found += [f"{e.self_device_time_total / 3000:8.3f} ms {e.count // 3:5d} x  {e.key[:150]}" for e in rows[:45]]
    return "\n".join(found)


def matmul_rate(device: str, size: int) -> float:
    """FLOP/s of a large product of random bfloat16 matrices; the median of ten."""
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    times = timed({"product": lambda: a @ b}, device, 2.0)["product"]
    return 2 * size**3 / (median(times) / 1000)


def table(results: dict[str, Any], rate: float) -> str:
    lines = ["| workload | cohort, d | contestant | ms | / dpfed private | / floor |", "|---|---|---|---|---|---|"]
    for name, result in results.items():
        medians = {n: median(values) for n, values in result["taken"].items()}
        private = [n for n in medians if n.startswith("dpfed, private")]
        if not private:
            continue
        best, floor = min(medians[n] for n in private), 1000 * result["notes"].get("flops", 0) / rate
        where = f"{result['notes']['cohort']}, {result['notes']['d']:,}"
        for n, milliseconds in medians.items():
            over = f"{milliseconds / floor:.2f}" if floor else "?"
            lines.append(f"| {name} | {where} | {n} | {milliseconds:.2f} | {milliseconds / best:.2f} | {over} |")
        lines.append(f"| {name} | {where} | floor | {floor:.2f} | {floor / best:.2f} | 1 |")
        problems = {
            k: v for k, v in result["notes"].items() if k.startswith(("error", "peak")) or "fail" in str(v) or "left" in str(v)
        }
        lines.append(f"  {problems}")
    return "\n".join(lines)


def main(
    workloads: tuple[str, ...] = tuple(WORKLOADS),
    warm_seconds: float = 300.0,
    seconds: float = 12.0,
    out: Path = Path("."),
    tiny: bool = False,
    device: str = "cuda",
    backend: str = "inductor",
    only: str = "",
    deadline: float = 0.0,
) -> None:
    """Time one step of every workload.

    Args:
        workloads: which ones.
        warm_seconds: no contestant begins to compile later than this.
        seconds: for timing each workload.
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
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4", "PYTHONUNBUFFERED": "1"}
    settings = [
        "--deadline",
        str(deadline),
        "--seconds",
        str(seconds),
        "--device",
        device,
        "--backend",
        backend,
        *(["--tiny"] if tiny else []),
    ]
    log = (out / "log.txt").open("w")
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_step", "--only", name, *settings],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        )
        for name in workloads
    }  # fmt: skip
    results: dict[str, Any] = {}
    heard = {name: hear(process) for name, process in processes.items()}
    timers = [Timer(warm_seconds + 100 + (3 * seconds + 15) * place, p.kill) for place, p in enumerate(processes.values())]
    for timer in timers:
        timer.daemon = True
        timer.start()
    ready = {name: next(heard[name], None) for name in processes}
    print(f"warm after {time.time() - began:.0f} s: {[n for n, r in ready.items() if r]}", flush=True)
    rate = matmul_rate(device, 512 if device == "cpu" else 8192)
    profiles = []
    for name, process in processes.items():
        if ready[name] is None:
            print(f"{name}: died; see log.txt", flush=True)
            continue
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("go\n")
            process.stdin.flush()
        result = next(heard[name], None)
        if result is None:
            print(f"{name}: died while it was timed; see log.txt", flush=True)
            continue
        profiles.append(result.pop("profile"))
        results[name] = result
        (out / "results.json").write_text(json.dumps({"rate": rate, "results": results}, indent=1))
        (out / "profile.txt").write_text("\n".join(profiles))
        (out / "table.md").write_text(table(results, rate))
        print(f"{name} done at {time.time() - began:.0f} s", flush=True)
    for process in processes.values():
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
