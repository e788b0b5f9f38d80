"""FedSAM (Qu et al. 2022, arXiv:2206.02618); under a private mechanism DP-FedSAM (Shi et al. 2023, arXiv:2303.11242).

    local step   g1 = grad(y) ; z = y + rho g1 / |g1|              the climb, without weight decay
                 g2 = grad(z) ; y <- y - eta_t (g2 + lambda y)     the step, from where the climb began
    upload       Delta_i = y - x
    server       x <- x + mean_i Delta_i

Under a private mechanism every step releases two noisy gradients. ``same_batch=True`` (SAM as it is meant) takes both on one
batch, and is charged as one event of multiplier sigma / sqrt(2); ``same_batch=False`` draws a second batch, and is charged as
two events. Neither costs what FedAvg does, nor exactly twice that, as the DP-FedAdamW paper has it.

Departs from the paper: Shi et al. protect clients (a plain SAM inside, each Delta_i clipped and noised); here records are
protected, as in the DP-FedAdamW paper. No momentum.
Departs from the released code: that of DP-FedAdamW clips and noises both gradients of the batch, not of each record, takes a
whole epoch instead of K steps, and has no weight decay (the paper's Table 17 has 0.001).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpfed.algorithm import Delta, Gradient, Round, Weights
from dpfed.flat import Layout


@dataclass(frozen=True)
class FedSAM:
    lr: float = 0.1
    weight_decay: float = 1e-3
    rho: float = 0.05
    same_batch: bool = True

    def server_init(self, theta: Tensor, layout: Layout) -> Weights:
        return Weights(theta)

    def client_init(self, s: Weights, memory: None, t: Round) -> Weights:
        return Weights(s.theta)

    def local_step(self, x: Weights, s: Weights, grad: Gradient, t: Round, k: int) -> Weights:
        uphill = grad(x.theta)
        steepest = uphill / (torch.linalg.vector_norm(uphill, dim=-1, keepdim=True) + 1e-12)
        g = grad(x.theta + self.rho * steepest, draw=0 if self.same_batch else 1)
        return Weights(x.theta - self.lr * t.scale * (g + self.weight_decay * x.theta))

    def upload(self, x: Weights, s: Weights, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta(x.theta - s.theta), None

    def server_step(self, s: Weights, u: Delta, t: Round) -> Weights:
        return Weights(s.theta + u.delta)
