"""LocalAdamW: every client runs AdamW from fresh moments, the server averages (DP-FedAdamW paper, 2026, Alg. 2).

    local step   m <- b1 m + (1-b1) g                    l. 13
                 v <- b2 v + (1-b2) g^2                  l. 14
                 y <- (1 - eta lambda) y - eta mhat / (sqrt(vhat) + eps)     l. 16
    upload       Delta_i = y - x
    server       x <- x + mean_i Delta_i

mhat and vhat divide by the weight of the average, which is 1 - b^k from a fresh start.
Departs from the paper: the noise is sigma C / B (the paper's l. 11 has C twice), and weight decay shrinks (l. 16 grows).
Departs from the released code: gradients are clipped per record (the code clips the batch, which protects no record).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpfed.algorithm import Delta, Gradient, Round, Weights
from dpfed.flat import Layout
from dpfed.pieces import Adaptive, decayed, no_moment, push


@dataclass(frozen=True)
class LocalAdamW:
    lr: float = 3e-4
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def server_init(self, theta: Tensor, layout: Layout) -> Weights:
        return Weights(theta)

    def client_init(self, s: Weights, memory: None, t: Round) -> Adaptive:
        return Adaptive(s.theta, no_moment(s.theta), no_moment(s.theta))

    def local_step(self, x: Adaptive, s: Weights, grad: Gradient, t: Round, k: int) -> Adaptive:
        lr, g = self.lr * t.scale, grad(x.theta)
        m, v = push(x.m, g, self.beta1), push(x.v, g * g, self.beta2)
        direction = m.mean / (v.mean.sqrt() + self.eps)
        return Adaptive(decayed(x.theta, lr, self.weight_decay) - lr * direction, m, v)

    def upload(self, x: Adaptive, s: Weights, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta(x.theta - s.theta), None

    def server_step(self, s: Weights, u: Delta, t: Round) -> Weights:
        return Weights(s.theta + u.delta)
