"""FedOpt (Reddi et al. 2021, arXiv:2003.00295): FedAvg's clients, and a server that takes their mean for a gradient.

    local step   y <- y - eta_t (g + lambda y)                     all in Alg. 2
    upload       Delta_i = y - x
    server       D = mean_i Delta_i ; m <- b1 m + (1-b1) D
                 v <- v + D^2                                      "adagrad"
                 v <- v - (1-b2) D^2 sign(v - D^2)                 "yogi"
                 v <- b2 v + (1-b2) D^2                            "adam"
                 x <- x + server_lr m / (sqrt(v) + tau)

``server="adam"`` is the DP-FedOpt(Adam) of the DP-FedAdamW paper, and the FedAdam of the FedAdamW paper. v begins at tau^2, and
nothing is corrected for its start. All of the server's work is on noised means, and costs nothing.

Departs from the paper: the clients may decay their weights.
Departs from the released code: that of FedAdamW begins with v = 0, b2 = 0.98 and tau = 0.01.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Delta, Gradient, Round, Weights
from dpfed.flat import Layout
from dpfed.pieces import ema


class Server(NamedTuple):
    theta: Tensor
    m: Tensor
    v: Tensor


@dataclass(frozen=True)
class FedOpt:
    lr: float = 0.1
    weight_decay: float = 1e-3
    server: Literal["adam", "yogi", "adagrad"] = "adam"
    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def server_init(self, theta: Tensor, layout: Layout) -> Server:
        return Server(theta, torch.zeros_like(theta), torch.full_like(theta, self.tau**2))

    def client_init(self, s: Server, memory: None, t: Round) -> Weights:
        return Weights(s.theta)

    def local_step(self, x: Weights, s: Server, grad: Gradient, t: Round, k: int) -> Weights:
        return Weights(x.theta - self.lr * t.scale * (grad(x.theta) + self.weight_decay * x.theta))

    def upload(self, x: Weights, s: Server, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta(x.theta - s.theta), None

    def server_step(self, s: Server, u: Delta, t: Round) -> Server:
        m, square = ema(s.m, u.delta, self.beta1), u.delta * u.delta
        if self.server == "adagrad":
            v = s.v + square
        elif self.server == "yogi":
            v = s.v - (1 - self.beta2) * square * (s.v - square).sign()
        else:
            v = ema(s.v, square, self.beta2)
        return Server(s.theta + self.server_lr * m / (v.sqrt() + self.tau), m, v)
