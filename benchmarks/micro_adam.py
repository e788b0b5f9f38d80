"""What MicroAdam remembers, and what a step of it takes, beside torch's fused Adam.

The tensors are those of transformer layers of width 384 and a head. Every contestant steps with the same gradients; they take
turns, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfed import Layout, algorithms, optim, pieces
from dpfed.algorithm import Release, Round, num_bytes
from dpfed.algorithms import micro_adam
from dpfed.flat import Part

WIDTH = 384
LINEARS = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
CONTESTANTS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch Adam, fused": lambda params: torch.optim.Adam(params, fused=True),
    "torch Adam, foreach": lambda params: torch.optim.Adam(params, foreach=True),
    "dpfed Adam": optim.Adam,
    "dpfed AdamBC": lambda params: optim.AdamBC(params, noise_var=1e-4),
    "dpfed MicroAdam": optim.MicroAdam,
    "dpfed MicroAdam, e unquantised": lambda params: optim.MicroAdam(params, ef_bits=None),
}


def parameters(num_layers: int, device: str) -> list[nn.Parameter]:
    shapes = [shape for _ in range(num_layers) for rows, columns in LINEARS for shape in ((rows, columns), (rows,))]
    random = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=random).to(device)) for shape in [*shapes, (10, WIDTH), (10,)]]
    for p in params:
        p.grad = torch.randn(p.shape, generator=random).to(device)
    return params


def remembered(optimizer: Any) -> int:
    """Bytes of all tensors the optimizer keeps between steps."""
    if isinstance(optimizer, Flat):
        return num_bytes(optimizer.state._replace(theta=None))
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in kept if isinstance(value, Tensor))


def machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {torch.get_num_threads()} of {torch.multiprocessing.cpu_count()} cores used"


class Flat:
    """The algorithm's own step on one vector, as rounds take it."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        [self.p] = params
        self.algorithm, self.layout = algorithms.MicroAdam(), Layout((Part("", (self.p.numel(),), "weights"),))
        self.state: Any = self.algorithm.server_init(self.p.detach().clone(), self.layout)
        self.num_steps = 0

    def step(self) -> None:
        assert self.p.grad is not None
        release, number = Release(self.p.grad, self.p.grad[:1]), Round(self.num_steps, 1.0, 1, self.layout)
        self.state, self.num_steps = self.algorithm.server_step(self.state, release, number), self.num_steps + 1


def standing(optimizer: Any, params: list[nn.Parameter]) -> list[Tensor]:
    """The parameters, and the ends of the blocks of the error, whose codes say little that these do not say."""
    if isinstance(optimizer, Flat):
        found = [optimizer.state.theta, optimizer.state.error.low, optimizer.state.error.high]
    else:
        states = [optimizer.state[p] for p in params]
        ends = [[state[f"error.{end}"].flatten() for state in states] for end in ("low", "high")]
        found = [torch.cat(pieces) for pieces in ([p.detach().flatten() for p in params], *ends)]
    return [vector.float().cpu() for vector in found]


def after(make: Any, params: list[nn.Parameter], steps: tuple[int, ...], plain: bool) -> list[list[Tensor]]:
    """Where MicroAdam stands after so many steps, each with its own gradient."""
    optimizer, found, kernels = make(params), list[list[Tensor]](), pieces.has_kernels
    optim.has_kernels = micro_adam.has_kernels = (lambda *_: False) if plain else kernels
    with torch.compiler.set_stance("force_eager"):
        for step in range(max(steps)):
            random = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=random).to(p.device)
            optimizer.step()
            if step + 1 in steps:
                found.append(standing(optimizer, params))
    optim.has_kernels = micro_adam.has_kernels = kernels
    return found


def agreement(make: Any, make_params: Callable[[str], list[nn.Parameter]], steps: tuple[int, ...], device: str) -> None:
    """Shares of what differs by more than a part in 10,000; of equal magnitudes at the edge of a top either may be taken."""
    here = after(make, make_params(device), steps, plain=False)
    print(f"MicroAdam, {len(here[0][0]):,} coordinates on this device; the share that differs by more than 1e-4 from")
    for name, where in (("the plain text there", device), ("the CPU", "cpu")):
        others = after(make, make_params(where), steps, plain=True)
        for step, one, other in zip(steps, here, others, strict=True):
            far = [(x - y).abs() > 1e-4 * y.abs().clamp(min=1e-3) for x, y in zip(one, other, strict=True)]
            theta, ends = (float(x.double().mean()) for x in (far[0], torch.cat(far[1:])))
            print(f"  {name:20}, after {step:2} steps: parameters {theta:.1e}, ends of the error's blocks {ends:.1e}")


def one_tensor(device: str) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(10_000_000, generator=random).to(device))
    p.grad = torch.randn(10_000_000, generator=random).to(device)
    return [p]


def measure(
    make_params: Callable[[], list[nn.Parameter]], contestants: dict[str, Any], repeat: int, device: str, clock: str
) -> None:
    """Print the memory and the step of MicroAdam and its peers as a table in Markdown."""
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    optimizers = {name: make(make_params()) for name, make in contestants.items()}
    taken: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(-12, repeat):  # as many turns as a window has slots, and two, are not counted
        for name, optimizer in optimizers.items():
            wait()
            began = now()
            optimizer.step()
            wait()
            if turn >= 0:
                taken[name].append(1000 * (now() - began))
    params = make_params()
    num_coordinates = sum(p.numel() for p in params)
    print(f"\n{machine(device)}; torch {torch.__version__}, float32; {num_coordinates:,} coordinates in {len(params)} tensors")
    print(f"medians of {repeat} turns by the {clock} clock; the ratio is the median of the ratios of the same turn")
    in_a_row = 50 if device.startswith("cuda") else repeat
    print(f"of {in_a_row} steps in a row: what the calls alone took (the host, unless the queue was full), then with the wait")
    print(f"\n| {'optimizer':30} | bytes / coordinate | {'ms':>8} | {'quartiles':>17} | / fused | calls, ms | and wait |")
    print(f"|{'-' * 32}|{'-' * 20}|{'-' * 10}|{'-' * 19}|{'-' * 9}|{'-' * 11}|{'-' * 10}|")
    fused = torch.tensor(taken["torch Adam, fused"])
    for name, optimizer in optimizers.items():
        began = now()
        for _ in range(in_a_row):
            optimizer.step()
        called = now()
        wait()
        calls, both = (1000 * (moment - began) / in_a_row for moment in (called, now()))
        own = torch.tensor(taken[name])
        low, middle, high = own.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        per_coordinate, ratio = remembered(optimizer) / num_coordinates, float((own / fused).median())
        print(
            f"| {name:30} | {per_coordinate:18.3f} | {middle:8.3f} | {f'{low:.3f} to {high:.3f}':>17} | {ratio:7.2f} "
            f"| {calls:9.3f} | {both:8.3f} |"
        )


def profile(name: str, optimizer: Any, num_coordinates: int, num_steps: int = 10) -> None:
    """What a step starts on the GPU, how often, and how long it takes there; and how much memory it takes meanwhile."""
    for _ in range(12):  # until a window is full
        optimizer.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(num_steps):
            optimizer.step()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda event: -event.device_time_total)
    launched = [event for event in events if event.device_time_total > 0]
    total = sum(event.device_time_total for event in launched) / num_steps
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    most = (torch.cuda.max_memory_allocated() - before) / num_coordinates
    print(f"\n{name}: {total:.0f} us on the device, {most:.1f} bytes / coordinate more inside of a step")
    for event in launched[:16]:
        print(f"  {event.count / num_steps:5.1f} x {event.device_time_total / event.count:8.1f} us  {event.key[:90]}")


def held(make: Callable[[], Any], num_coordinates: int) -> float:
    """Bytes a coordinate that a new optimizer holds after two steps, beside its parameters and their gradients."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = make()
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before) / num_coordinates


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument(
        "--layers", type=int, nargs="+", help="transformer layers, of 1.8 million parameters each; 2, on a GPU 2 and 6"
    )
    words.add_argument("--repeat", type=int, default=15, help="how many turns each contestant gets")
    words.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves it to torch")
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:1")
    words.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: of this process, steadier on a busy machine, not for a GPU",
    )
    words.add_argument(
        "--pieces",
        type=lambda pair: tuple(map(int, pair.split("x"))),
        nargs="*",
        default=[(4096, 8192)],
        help="what else to profile on a GPU: coordinates of a program of most kernels, and of the last one, as 2048x8192",
    )
    chosen = words.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    on_gpu = chosen.device != "cpu"
    layers = chosen.layers or ([2, 6] if on_gpu else [2])
    if on_gpu:
        for number in layers:
            steps = (1, 3, 12) if number == min(layers) else (1, 3)  # as far as into the slots' second turn is slow on a CPU
            agreement(optim.MicroAdam, partial(parameters, number), steps, chosen.device)
        agreement(Flat, one_tensor, (1, 3), chosen.device)
    for number in layers:
        measure(partial(parameters, number, chosen.device), CONTESTANTS, chosen.repeat, chosen.device, chosen.clock)
    if on_gpu:
        flat = "the algorithm, one vector"
        single = {name: CONTESTANTS[name] for name in ("torch Adam, fused", "dpfed MicroAdam")} | {flat: Flat}
        measure(partial(one_tensor, chosen.device), single, chosen.repeat, chosen.device, chosen.clock)
        for name in ("torch Adam, fused", "dpfed MicroAdam"):
            params = parameters(6, chosen.device)
            size, make = sum(p.numel() for p in params), partial(CONTESTANTS[name], params)
            print(f"\n{name} holds {held(make, size):.3f} bytes / coordinate between steps")
            profile(name, make(), size)
        vector = one_tensor(chosen.device)
        profile("dpfed MicroAdam, one tensor", optim.MicroAdam(vector), 10_000_000)
        profile(flat, Flat(vector), 10_000_000)
        for chunk, stretch in chosen.pieces:
            from dpfed import kernels

            kernels.CHUNK, kernels.STRETCH = chunk, stretch
            profile(f"{flat}, by {chunk} and {stretch}", Flat(vector), 10_000_000)


if __name__ == "__main__":
    main()
