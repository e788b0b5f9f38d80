"""SGD, with the server stepping; under a private mechanism DP-SGD (Abadi et al., CCS 2016, arXiv:1607.00133).

    client       uploads g, the private gradient of one step     Alg. 1, "compute", "clip", "add noise"
    server       buf <- momentum buf + g + lambda x
                 x <- x - eta buf                                Alg. 1, "descent"

With one client this is centralised training; with many, g is the mean of theirs, and the data stays where it is.
Departs from the paper: momentum and weight decay are new, both after the noise, as torch.optim.SGD has them.
Departs from the released code: none was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Gradient, Release, Round, require_one_step
from dpfed.flat import Layout


class Server(NamedTuple):
    theta: Tensor
    buffer: Tensor


@dataclass(frozen=True)
class SGD:
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def server_init(self, theta: Tensor, layout: Layout) -> Server:
        return Server(theta, torch.zeros_like(theta))

    def client_init(self, s: Server, memory: None, t: Round) -> None:
        require_one_step(t)

    def local_step(self, x: None, s: Server, grad: Gradient, t: Round, k: int) -> Release:
        return Release(grad(s.theta), grad.noise_var)

    def upload(self, x: Release, s: Server, memory: None, t: Round) -> tuple[Release, None]:
        return x, None

    def server_step(self, s: Server, u: Release, t: Round) -> Server:
        buffer = self.momentum * s.buffer + u.gradient + self.weight_decay * s.theta
        return Server(s.theta - self.lr * t.scale * buffer, buffer)
