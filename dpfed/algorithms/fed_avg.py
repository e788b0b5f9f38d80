"""FedAvg (McMahan et al. 2017, arXiv:1602.05629); under a private mechanism DP-FedAvg, as in Noble et al. 2022.

    local step   y <- y - eta_t (g + lambda y)          K times
    upload       Delta_i = y - x
    server       x <- x + server_lr * mean_i Delta_i

Departs from the paper: the server averages uniformly (the weights are the engine's, and public).
Departs from the released code: Noble et al. clip at the median norm of the batch, which depends on data without being paid
for; here the threshold is a constant. Weight decay is added after the noise, so that it costs no privacy and is not clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpfed.algorithm import Delta, Gradient, Round, Weights
from dpfed.flat import Layout


@dataclass(frozen=True)
class FedAvg:
    lr: float = 0.1
    weight_decay: float = 1e-3
    server_lr: float = 1.0

    def server_init(self, theta: Tensor, layout: Layout) -> Weights:
        return Weights(theta)

    def client_init(self, s: Weights, memory: None, t: Round) -> Weights:
        return Weights(s.theta)

    def local_step(self, x: Weights, s: Weights, grad: Gradient, t: Round, k: int) -> Weights:
        return Weights(x.theta - self.lr * t.scale * (grad(x.theta) + self.weight_decay * x.theta))

    def upload(self, x: Weights, s: Weights, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta(x.theta - s.theta), None

    def server_step(self, s: Weights, u: Delta, t: Round) -> Weights:
        return Weights(s.theta + self.server_lr * u.delta)
