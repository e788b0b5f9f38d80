"""LoRA's two factors by turns: an algorithm that in every round works on one of two parts of the vector, and only there.

In even rounds it trains A and whatever else is trained, such as the head; in odd rounds B (RoLoRA, Chen et al. 2025, arXiv
2502.01755). Over the clients, the mean of the products B A is the product of the means where all have the same A or the same B,
and otherwise not; noise then enters as it is, and not as a product of two noises. FFA-LoRA (Sun et al. 2024, arXiv 2403.12313)
keeps A for good: ``lora(freeze_a=True)``. Clients send only the part whose turn it is.

Privacy: the gradient is restricted to the part, a public choice of coordinates, before it is clipped; the sensitivity is the
same C, and a call costs what a call costs. The other part gets no noise, no weight decay and no step, and its moments rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Gradient, Round, Tree
from dpfed.errors import InputError
from dpfed.flat import Layout


class Turns(NamedTuple):
    """The server's states of an algorithm, one for each part."""

    first: Any
    second: Any

    @property
    def theta(self) -> Tensor:
        return torch.cat([self.first.theta, self.second.theta], dim=-1)


@dataclass(frozen=True)
class Alternating:
    """An algorithm on one part after the other. A part's own rounds are numbered through; the schedule is that of the run."""

    algorithm: Any

    @property
    def name(self) -> str:
        return f"{type(self.algorithm).__name__} by turns"

    def server_init(self, theta: Tensor, layout: Layout) -> Turns:
        if not {"lora_A", "lora_B"} <= {part.group for part in layout.parts}:
            raise InputError(f"algorithm: {self.name} needs a model with LoRA, both A and B of which are trained. See lora().")
        end = layout.group("lora_B").start
        vectors, parts = (theta[..., :end], theta[..., end:]), [_part(layout, number) for number in range(2)]
        return Turns(*map(self.algorithm.server_init, vectors, parts))

    def client_init(self, s: Turns, memory: Tree, t: Round) -> Tree:
        return self.algorithm.client_init(s[t.index % 2], memory, _own(t))

    def local_step(self, x: Tree, s: Turns, grad: Gradient, t: Round, k: int) -> Tree:
        within = _Within(grad, s, t.index % 2)
        return self.algorithm.local_step(x, s[t.index % 2], within, _own(t), k)

    def upload(self, x: Tree, s: Turns, memory: Tree, t: Round) -> tuple[Tree, None]:
        upload, memory = self.algorithm.upload(x, s[t.index % 2], memory, _own(t))
        if memory is not None:
            raise InputError(f"algorithm: {self.name} would need a memory for each part. Take one that keeps none.")
        return upload, None

    def server_step(self, s: Turns, u: Tree, t: Round) -> Turns:
        stepped = self.algorithm.server_step(s[t.index % 2], u, _own(t))
        return Turns(stepped, s.second) if t.index % 2 == 0 else Turns(s.first, stepped)


class _Within:
    """The gradient of some coordinates, as a function of them alone; the others stand where the server has them."""

    def __init__(self, grad: Any, s: Turns, number: int) -> None:
        self._grad, self._s, self._number, self.noise_var = grad, s, number, grad.noise_var

    def __call__(self, theta: Tensor, *, draw: int = 0, minus: tuple[float, Tensor] | None = None) -> Tensor:
        start = (0, self._s.first.theta.shape[-1])[self._number]
        other = None if minus is None else (minus[0], self._whole(minus[1]))
        return self._grad(self._whole(theta), draw=draw, minus=other, only=slice(start, start + theta.shape[-1]))

    def _whole(self, theta: Tensor) -> Tensor:
        rest: Tensor = self._s[1 - self._number].theta.expand(*theta.shape[:-1], -1)
        return torch.cat([theta, rest] if self._number == 0 else [rest, theta], dim=-1)


def _own(t: Round) -> Round:
    """The round as the part whose turn it is sees it."""
    return replace(t, index=t.index // 2, layout=_part(t.layout, t.index % 2))


def _part(layout: Layout, number: int) -> Layout:
    """Everything but B, which stands at the end; or B."""
    return Layout(tuple(part for part in layout.parts if (part.group == "lora_B") == bool(number)))
