"""FedLADA (Sun et al. 2023, arXiv:2308.00522): local AMSGrad from a shared second moment, amended by the global direction.

    client       m <- 0 ; v, vmax <- the server's v
    local step   m <- b1 m + (1-b1) g ; v <- b2 v + (1-b2) g^2 ; vmax <- max(vmax, v)
                 y <- y - eta (a m / sqrt(vmax) + (1-a) D)
    upload       Delta_i = y - x, vmax
    server       x <- x + mean_i Delta_i ; D <- -mean Delta_i / (K eta) ; v <- mean vmax

v begins at eps^2, and nothing is corrected for its start. Under noise the maximum climbs with every lucky draw;
``amsgrad=False`` takes v itself (never below eps^2).

Departs from the paper: the formulas are those of a public re-implementation (fedbrew), not compared with the paper's own.
Departs from the released code: that of FedAdamW has no maximum (``amsgrad=False``) and a coupled weight decay of 0.001.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Gradient, Round
from dpfed.flat import Layout
from dpfed.pieces import ema, mean_direction


class Server(NamedTuple):
    theta: Tensor
    direction: Tensor
    v: Tensor


class Local(NamedTuple):
    theta: Tensor
    m: Tensor
    v: Tensor
    vmax: Tensor


class Upload(NamedTuple):
    delta: Tensor
    vmax: Tensor


@dataclass(frozen=True)
class FedLADA:
    lr: float = 3e-4
    a: float = 0.1
    amsgrad: bool = True
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def server_init(self, theta: Tensor, layout: Layout) -> Server:
        return Server(theta, torch.zeros_like(theta), torch.full_like(theta, self.eps**2))

    def client_init(self, s: Server, memory: None, t: Round) -> Local:
        return Local(s.theta, torch.zeros_like(s.theta), s.v, s.v)

    def local_step(self, x: Local, s: Server, grad: Gradient, t: Round, k: int) -> Local:
        g = grad(x.theta)
        m, v = ema(x.m, g, self.beta1), ema(x.v, g * g, self.beta2)
        vmax = torch.maximum(x.vmax, v) if self.amsgrad else v.clamp(min=self.eps**2)
        step = self.a * m / vmax.sqrt() + (1 - self.a) * s.direction
        return Local(x.theta - self.lr * t.scale * step, m, v, vmax)

    def upload(self, x: Local, s: Server, memory: None, t: Round) -> tuple[Upload, None]:
        return Upload(x.theta - s.theta, x.vmax), None

    def server_step(self, s: Server, u: Upload, t: Round) -> Server:
        direction = mean_direction(u.delta, self.lr * t.scale, t.num_steps, otherwise=s.direction)
        return Server(s.theta + u.delta, direction, u.vmax)
