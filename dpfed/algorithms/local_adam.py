"""Adaptive Adam: every client runs Adam from fresh moments, the server averages (a baseline of the FedAdamW paper, 2026).

    local step   g <- g + lambda y                                 the decay is part of the gradient ("coupled")
                 m <- b1 m + (1-b1) g ; v <- b2 v + (1-b2) g^2
                 y <- y - eta mhat / (sqrt(vhat) + eps)
    upload       Delta_i = y - x
    server       x <- x + mean_i Delta_i

mhat and vhat divide by the weight of the average, which is 1 - b^k from a fresh start.
Departs from the paper: it prints no algorithm of this name; the formulas are those of Adam (Kingma and Ba 2015).
Departs from the released code: it also clips the gradient of the whole batch at norm 10; here only a mechanism clips.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpfed.algorithm import Delta, Gradient, Round, Weights
from dpfed.flat import Layout
from dpfed.pieces import Adaptive, no_moment, push


@dataclass(frozen=True)
class LocalAdam:
    lr: float = 3e-4
    weight_decay: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def server_init(self, theta: Tensor, layout: Layout) -> Weights:
        return Weights(theta)

    def client_init(self, s: Weights, memory: None, t: Round) -> Adaptive:
        return Adaptive(s.theta, no_moment(s.theta), no_moment(s.theta))

    def local_step(self, x: Adaptive, s: Weights, grad: Gradient, t: Round, k: int) -> Adaptive:
        g = grad(x.theta) + self.weight_decay * x.theta
        m, v = push(x.m, g, self.beta1), push(x.v, g * g, self.beta2)
        return Adaptive(x.theta - self.lr * t.scale * m.mean / (v.mean.sqrt() + self.eps), m, v)

    def upload(self, x: Adaptive, s: Weights, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta(x.theta - s.theta), None

    def server_step(self, s: Weights, u: Delta, t: Round) -> Weights:
        return Weights(s.theta + u.delta)
