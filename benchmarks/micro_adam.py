"""What MicroAdam remembers, and what a step of it takes, beside torch's fused Adam.

The tensors are those of transformer layers of width 384 and a head. Every contestant steps with the same gradients; they take
turns, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dpfed import optim

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


def remembered(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors the optimizer keeps between steps."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in kept if isinstance(value, Tensor))


def machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {torch.get_num_threads()} of {torch.multiprocessing.cpu_count()} cores used"


def disagreement(device: str, num_steps: int) -> float:
    """The share of coordinates that MicroAdam puts elsewhere on this device than on the CPU, by more than a part in 10,000."""
    ended: list[Tensor] = []
    for where in ("cpu", device):
        params = parameters(1, where)
        optimizer = optim.MicroAdam(params, lr=0.1)
        for _ in range(num_steps):
            optimizer.step()
        ended.append(torch.cat([p.detach().cpu().flatten() for p in params]))
    return float(((ended[0] - ended[1]).abs() > 1e-4 * ended[0].abs().clamp(min=1e-3)).double().mean())


def measure(layers: int, repeat: int, threads: int, device: str, clock: str) -> None:
    """Print the memory and the step of MicroAdam and its peers as a table in Markdown."""
    if threads:
        torch.set_num_threads(threads)
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    optimizers = {name: make(parameters(layers, device)) for name, make in CONTESTANTS.items()}
    taken: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(-2, repeat):  # two turns to warm up are not counted
        for name, optimizer in optimizers.items():
            wait()
            began = now()
            optimizer.step()
            wait()
            if turn >= 0:
                taken[name].append(1000 * (now() - began))
    params = parameters(layers, device)
    num_coordinates = sum(p.numel() for p in params)
    print(f"{machine(device)}; torch {torch.__version__}, float32; {num_coordinates:,} coordinates in {len(params)} tensors")
    print(f"medians of {repeat} turns by the {clock} clock; the ratio is the median of the ratios of the same turn")
    print(f"\n| {'optimizer':30} | bytes / coordinate | {'ms':>8} | {'quartiles':>17} | / fused |")
    print(f"|{'-' * 32}|{'-' * 20}|{'-' * 10}|{'-' * 19}|{'-' * 9}|")
    fused = torch.tensor(taken["torch Adam, fused"])
    for name, optimizer in optimizers.items():
        own = torch.tensor(taken[name])
        low, middle, high = own.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        per_coordinate, ratio = remembered(optimizer) / num_coordinates, float((own / fused).median())
        print(f"| {name:30} | {per_coordinate:18.3f} | {middle:8.2f} | {f'{low:.2f} to {high:.2f}':>17} | {ratio:7.2f} |")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--layers", type=int, nargs="+", default=[2], help="transformer layers; each has 1.8 million parameters")
    words.add_argument("--repeat", type=int, default=15, help="how many turns each contestant gets")
    words.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves it to torch")
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:1")
    words.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: of this process, steadier on a busy machine, not for a GPU",
    )
    chosen = words.parse_args()
    if chosen.device != "cpu":
        shares = [f"{disagreement(chosen.device, num_steps):.1e}" for num_steps in (1, 3, 12)]
        print(f"MicroAdam, share of coordinates that differ from the CPU's after 1, 3 and 12 steps: {', '.join(shares)}\n")
    for layers in chosen.layers:
        measure(layers, chosen.repeat, chosen.threads, chosen.device, chosen.clock)


if __name__ == "__main__":
    main()
