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
from typing import NamedTuple

from torch import Tensor

from dpfed.algorithm import Gradient, Round
from dpfed.flat import Layout


class Server(NamedTuple):
    theta: Tensor


class Local(NamedTuple):
    theta: Tensor


class Upload(NamedTuple):
    delta: Tensor


@dataclass(frozen=True)
class FedAvg:
    lr: float = 0.1
    weight_decay: float = 1e-3
    server_lr: float = 1.0

    def server_init(self, theta: Tensor, layout: Layout) -> Server:
        return Server(theta)

    def client_init(self, s: Server, memory: None, t: Round) -> Local:
        return Local(s.theta)

    def local_step(self, x: Local, s: Server, grad: Gradient, t: Round, k: int) -> Local:
        return Local(x.theta - self.lr * t.scale * (grad(x.theta) + self.weight_decay * x.theta))

    def upload(self, x: Local, s: Server, memory: None, t: Round) -> tuple[Upload, None]:
        return Upload(x.theta - s.theta), None

    def server_step(self, s: Server, u: Upload, t: Round) -> Server:
        return Server(s.theta + self.server_lr * u.delta)
