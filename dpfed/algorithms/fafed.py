"""FAFED (Wu et al. 2023, arXiv:2212.00974): the clients share both moments of Adam.

    client       m, v <- the server's, with their weights
    local step   m <- b1 m + (1-b1) g ; v <- b2 v + (1-b2) g^2     "adam_agg"
                 h = g(y_k) - (1-a) g(y_k-1)                       "storm": of every record, on one batch, one release
                 m <- (1-a) m + h ; v <- b2 v + (1-b2) h^2
                 y <- y - eta mhat / (sqrt(vhat) + rho)
    upload       Delta_i = y - x, m, v and their weights
    server       x <- x + mean_i Delta_i ; m, v <- the means

``adam_agg`` is what the DP-FedAdamW paper compares with: Adam whose two moments are averaged. ``storm`` is the recursion of the
FAFED paper; its two gradients are subtracted before they are clipped, so a step releases one vector, at FedAvg's price.

Departs from the paper: averages divide by the weight that travels with them, instead of starting from means of first gradients;
the denominator moves within a round, not only between rounds; only some clients take part, so the first step of a round has no
step before it, and takes y_0 for both points (h = a g); in ``storm`` v is made of h, which is what was released.
Departs from the released code: none is known to be the authors'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from dpfed.algorithm import Gradient, Round
from dpfed.flat import Layout
from dpfed.pieces import Adaptive, Moment, no_moment, push


class Local(NamedTuple):
    theta: Tensor
    before: Tensor
    m: Moment
    v: Moment


class Upload(NamedTuple):
    delta: Tensor
    m: Moment
    v: Moment


@dataclass(frozen=True)
class FAFED:
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.99
    rho: float = 0.01
    variant: Literal["adam_agg", "storm"] = "adam_agg"
    a: float = 0.1

    def server_init(self, theta: Tensor, layout: Layout) -> Adaptive:
        return Adaptive(theta, no_moment(theta), no_moment(theta))

    def client_init(self, s: Adaptive, memory: None, t: Round) -> Local:
        return Local(s.theta, s.theta, s.m, s.v)

    def local_step(self, x: Local, s: Adaptive, grad: Gradient, t: Round, k: int) -> Local:
        if self.variant == "storm":
            g = grad(x.theta, minus=(1 - self.a, x.before))
            m = Moment((1 - self.a) * x.m.value + g, (1 - self.a) * x.m.weight + self.a)
        else:
            g = grad(x.theta)
            m = push(x.m, g, self.beta1)
        v = push(x.v, g * g, self.beta2)
        return Local(x.theta - self.lr * t.scale * m.mean / (v.mean.sqrt() + self.rho), x.theta, m, v)

    def upload(self, x: Local, s: Adaptive, memory: None, t: Round) -> tuple[Upload, None]:
        return Upload(x.theta - s.theta, x.m, x.v), None

    def server_step(self, s: Adaptive, u: Upload, t: Round) -> Adaptive:
        return Adaptive(s.theta + u.delta, u.m, u.v)
