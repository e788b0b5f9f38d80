"""Adam (Kingma and Ba, ICLR 2015, arXiv:1412.6980), with the server stepping; under a private mechanism DP-Adam.

    client       uploads g, the private gradient of one step
    server       g <- g + lambda x                               coupled decay, off by default
                 m <- b1 m + (1-b1) g ; v <- b2 v + (1-b2) g^2   Alg. 1
                 x <- x - eta mhat / (sqrt(vhat) + eps)          mhat = m / (1 - b1^t), vhat = v / (1 - b2^t)

The noise counts in v, too: where it drowns the signal all roots are near sigma C / B, and this is SGD with momentum.
Departs from the paper: in nothing but the gradient, which is private.
Departs from the released code: none was read; without noise this is torch.optim.Adam.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpfed.algorithm import Gradient, Release, Round, require_one_step
from dpfed.flat import Layout
from dpfed.pieces import Adaptive, no_moment, push


@dataclass(frozen=True)
class Adam:
    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def server_init(self, theta: Tensor, layout: Layout) -> Adaptive:
        return Adaptive(theta, no_moment(theta), no_moment(theta))

    def client_init(self, s: Adaptive, memory: None, t: Round) -> None:
        require_one_step(t)

    def local_step(self, x: None, s: Adaptive, grad: Gradient, t: Round, k: int) -> Release:
        return Release(grad(s.theta), grad.noise_var)

    def upload(self, x: Release, s: Adaptive, memory: None, t: Round) -> tuple[Release, None]:
        return x, None

    def server_step(self, s: Adaptive, u: Release, t: Round) -> Adaptive:
        g = u.gradient + self.weight_decay * s.theta
        m, v = push(s.m, g, self.beta1), push(s.v, g * g, self.beta2)
        return Adaptive(s.theta - self.lr * t.scale * m.mean / (v.mean.sqrt() + self.eps), m, v)
