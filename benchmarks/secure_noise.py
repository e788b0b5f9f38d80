"""What secure noise costs: of vectors, and beside one private step of a ViT-Tiny with LoRA, one client, 16 records, on a CPU.

python -m benchmarks.secure_noise
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import tyro
from torch import Tensor, nn

from benchmarks.workloads import vit_tiny
from dpfed.flat import FlatModel
from dpfed.mechanism import Gaussian
from dpfed.privacy import Part, PrivateGradient, Sums
from dpfed.secure import secure_noise

MECHANISM = Gaussian(sigma=1.0, batch_size=16)


def private_step(module: nn.Module) -> tuple[int, Callable[[], Tensor]]:
    """A gradient that is clipped, summed, and not noised; and how many coordinates it has."""
    model = FlatModel(module)
    examples = {"pixel_values": torch.randn(1, 16, 3, 32, 32), "y": torch.randint(100, (1, 16))}
    part = Part(examples, torch.ones(1, 16, dtype=torch.bool))
    sizes, theta = torch.full((1, 1), 16.0), model.theta0()
    bare = PrivateGradient(Sums(model), lambda draw: [part], lambda total, *_: total, sizes, MECHANISM)
    return model.num_parameters, lambda: bare(theta)


def seconds(work: Callable[[], Tensor]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main(repeat: int = 7, sizes: tuple[int, ...] = (10**6, 10**7)) -> None:
    """Medians of CPU seconds, on one thread.

    Args:
        repeat: how many turns each gets.
        sizes: of the vectors.
    """
    torch.set_num_threads(1)
    noise = secure_noise(1.0)

    def noised(num: int) -> Callable[[], Tensor]:
        total = torch.zeros(1, num)
        return lambda: noise(total, 1.0, 0, 0)

    for num in sizes:
        secure = torch.tensor([seconds(noised(num)) for _ in range(repeat)]).median()
        keyed = torch.tensor([seconds(lambda num=num: torch.randn(num)) for _ in range(repeat)]).median()
        each = f"{1e9 * secure / num:.0f} ns each"
        print(f"{num:>10,} coordinates: {1e3 * secure:.1f} ms, {each}; torch.randn {1e3 * keyed:.1f} ms")
    trained = vit_tiny("eager", False)
    for name, module in (("LoRA", trained), ("all weights", vit_tiny("eager", False).requires_grad_(True))):
        num, step = private_step(module)
        step()
        turns = torch.tensor([(seconds(step), seconds(noised(num))) for _ in range(repeat)])
        bare, secure = turns.median(0).values
        share = (turns[:, 1] / turns[:, 0]).median()
        print(f"ViT-Tiny, {name}, d = {num:,}: a step {1e3 * bare:.0f} ms, its noise {1e3 * secure:.0f} ms: {share:.1%}")


if __name__ == "__main__":
    tyro.cli(main)
