"""FedProx (Li et al. 2020, arXiv:1812.06127): FedAvg with a pull towards the model that the round began with.

    local step   y <- y - eta_t (g + mu (y - x) + lambda y)        Alg. 2 on eq. 2, by K steps of SGD
    upload       Delta_i = y - x
    server       x <- x + mean_i Delta_i

With mu = 0 it is FedAvg. The pull, like the weight decay, is added after the noise: it knows no record and costs nothing.
Departs from the paper: K steps stand for its inexact minimisation, the same number at every client; clients are drawn uniformly
(the paper draws them by their size).
Departs from the released code: no client is made to drop out or to stop early.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpfed.algorithm import Delta, Gradient, Round, Weights
from dpfed.flat import Layout


@dataclass(frozen=True)
class FedProx:
    lr: float = 0.1
    weight_decay: float = 1e-3
    mu: float = 0.01

    def server_init(self, theta: Tensor, layout: Layout) -> Weights:
        return Weights(theta)

    def client_init(self, s: Weights, memory: None, t: Round) -> Weights:
        return Weights(s.theta)

    def local_step(self, x: Weights, s: Weights, grad: Gradient, t: Round, k: int) -> Weights:
        pull = self.mu * (x.theta - s.theta) + self.weight_decay * x.theta
        return Weights(x.theta - self.lr * t.scale * (grad(x.theta) + pull))

    def upload(self, x: Weights, s: Weights, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta(x.theta - s.theta), None

    def server_step(self, s: Weights, u: Delta, t: Round) -> Weights:
        return Weights(s.theta + u.delta)
