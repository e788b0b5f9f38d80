"""FedCM (Xu et al. 2021, arXiv:2106.10874): every local step is mixed with the direction of the round before.

    local step   y <- y - eta_t (a (g + lambda y) + (1-a) D)
    upload       Delta_i = y - x
    server       x <- x + mean_i Delta_i ; D <- -mean_i Delta_i / (K eta_t)

D is a moving average of the mean gradients of the rounds, with the factor 1 - a; a = 1 is FedAvg. Weight decay is part of the
gradient, so it is mixed as well.

Departs from the paper: the server adds the mean as it is, which is a step along D at the rate K eta; D begins at zero.
Departs from the released code: that of FedAdamW has the gradient weighted by 1 - gamma, which is a here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Delta, Gradient, Round, Weights
from dpfed.flat import Layout
from dpfed.pieces import mean_direction


class Server(NamedTuple):
    theta: Tensor
    direction: Tensor


@dataclass(frozen=True)
class FedCM:
    lr: float = 0.1
    weight_decay: float = 1e-3
    a: float = 0.1

    def server_init(self, theta: Tensor, layout: Layout) -> Server:
        return Server(theta, torch.zeros_like(theta))

    def client_init(self, s: Server, memory: None, t: Round) -> Weights:
        return Weights(s.theta)

    def local_step(self, x: Weights, s: Server, grad: Gradient, t: Round, k: int) -> Weights:
        g = grad(x.theta) + self.weight_decay * x.theta
        return Weights(x.theta - self.lr * t.scale * (self.a * g + (1 - self.a) * s.direction))

    def upload(self, x: Weights, s: Server, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta(x.theta - s.theta), None

    def server_step(self, s: Server, u: Delta, t: Round) -> Server:
        direction = mean_direction(u.delta, self.lr * t.scale, t.num_steps, otherwise=s.direction)
        return Server(s.theta + u.delta, direction)
