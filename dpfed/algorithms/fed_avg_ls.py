"""FedAvg-LS (Liang et al. 2020, arXiv:2005.00218): Laplacian smoothing of what was noised.

    local step   y <- y - eta_t (g + lambda y)                     where="server"
                 y <- y - eta_t (LS(g) + lambda y)                 where="client_step"
    upload       Delta_i = y - x
    server       x <- x + LS(mean_i Delta_i)                       where="server"
                 x <- x + mean_i Delta_i                           where="client_step"

LS(v) = (I - sigma_ls L)^-1 v for every tensor, flattened to a ring: independent noise varies from neighbour to neighbour and is
damped, the mean stays. It sees only what is noised already, and costs nothing. With sigma_ls = 0 it is FedAvg.

Departs from the paper: it protects clients (each Delta_i is clipped, the server adds the noise); here records are protected, as
in the DP-FedAdamW paper, and the noise is in the gradients. Tensors of fewer than three numbers are left as they are.
Departs from the released code: that of DP-FedAdamW takes the smoothed step and then the rough one as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dpfed.algorithm import Delta, Gradient, Round, Weights
from dpfed.flat import Layout
from dpfed.pieces import smooth_tensors


@dataclass(frozen=True)
class FedAvgLS:
    lr: float = 0.1
    weight_decay: float = 1e-3
    sigma_ls: float = 1.0
    where: Literal["server", "client_step"] = "server"

    def server_init(self, theta: Tensor, layout: Layout) -> Weights:
        return Weights(theta)

    def client_init(self, s: Weights, memory: None, t: Round) -> Weights:
        return Weights(s.theta)

    def local_step(self, x: Weights, s: Weights, grad: Gradient, t: Round, k: int) -> Weights:
        g = grad(x.theta)
        if self.where == "client_step":
            g = smooth_tensors(g, t.layout.sizes, self.sigma_ls)
        return Weights(x.theta - self.lr * t.scale * (g + self.weight_decay * x.theta))

    def upload(self, x: Weights, s: Weights, memory: None, t: Round) -> tuple[Delta, None]:
        return Delta(x.theta - s.theta), None

    def server_step(self, s: Weights, u: Delta, t: Round) -> Weights:
        delta = smooth_tensors(u.delta, t.layout.sizes, self.sigma_ls) if self.where == "server" else u.delta
        return Weights(s.theta + delta)
