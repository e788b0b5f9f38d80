"""SCAFFOLD (Karimireddy et al. 2020, arXiv:1910.06378); privately DP-SCAFFOLD (Noble et al. 2022, arXiv:2111.09278).

    local step   y <- y - eta_t (g - c_i + c + lambda y)           Karimireddy Alg. 1
    upload       c_i+ = mean of the K gradients g                  "mean"; there option I costs one more gradient
                 c_i+ = c_i - c - Delta_i / (K eta_t)              "option2": there option II
                 Delta_i = y - x ; dc_i = c_i+ - c_i               c_i stays with the client
    server       x <- x + server_lr mean_i Delta_i
                 c <- c + (S / N) mean_i dc_i

The two controls are one without weight decay; with it, option II carries lambda times the mean iterate as well. The gradient is
clipped and noised before c - c_i is added, so c_i is a function of what was released, and costs nothing of its own.
``warm_start``: in so many first rounds the clients only gather c_i and the model stands still (4 N / S rounds in the code of
Noble et al.). Those gradients are released too, and are charged like any others.

Departs from the paper: a client that was never seen begins with c_i = 0. A warm start renews c_i whenever a client takes part.
Departs from the released code: Noble et al. clip at the median norm of the batch, which depends on data without being paid for.
In that of DP-FedAdamW the correction enters as a constant beside the loss, so that it has no gradient and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Gradient, Round
from dpfed.flat import Layout
from dpfed.pieces import mean_direction


class Server(NamedTuple):
    theta: Tensor
    c: Tensor


class Memory(NamedTuple):
    c: Tensor


class Local(NamedTuple):
    theta: Tensor
    c: Tensor
    gathered: Tensor


class Upload(NamedTuple):
    delta: Tensor
    dc: Tensor


@dataclass(frozen=True)
class Scaffold:
    lr: float = 0.1
    weight_decay: float = 1e-3
    control: Literal["mean", "option2"] = "mean"
    warm_start: int = 0
    server_lr: float = 1.0

    def server_init(self, theta: Tensor, layout: Layout) -> Server:
        return Server(theta, torch.zeros_like(theta))

    def client_init(self, s: Server, memory: Memory | None, t: Round) -> Local:
        nothing = torch.zeros_like(s.theta)
        return Local(s.theta, nothing if memory is None else memory.c, nothing)

    def local_step(self, x: Local, s: Server, grad: Gradient, t: Round, k: int) -> Local:
        g = grad(x.theta)
        lr = self.lr * t.scale if t.index >= self.warm_start else 0.0
        step = g - x.c + s.c + self.weight_decay * x.theta
        return Local(x.theta - lr * step, x.c, x.gathered + g / t.num_steps)

    def upload(self, x: Local, s: Server, memory: Memory | None, t: Round) -> tuple[Upload, Memory]:
        delta, c = x.theta - s.theta, x.gathered
        if self.control == "option2" and t.index >= self.warm_start:
            c = x.c - s.c + mean_direction(delta, self.lr * t.scale, t.num_steps, otherwise=s.c)
        return Upload(delta, c - x.c), Memory(c)

    def server_step(self, s: Server, u: Upload, t: Round) -> Server:
        return Server(s.theta + self.server_lr * u.delta, s.c + t.participation * u.dc)
