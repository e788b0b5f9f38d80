"""AdamBC (Tang, Shpilevskiy and Lecuyer, 2023, arXiv:2312.14334), with the server stepping; in the papers DP-AdamBC.

    client       uploads g and its noise variance Phi = (sigma C / B)^2
    server       m <- b1 m + (1-b1) g ; v <- b2 v + (1-b2) g^2
                 Phi of the mean over S clients is mean Phi / S ; averaged like v
                 x <- x - eta mhat / sqrt(max(vhat - Phihat, floor))

Adam's second moment is that of the signal plus Phi; without Phi the step adapts to the signal again. The start is corrected
(vhat) before Phi is subtracted. ``floor`` is the paper's gamma'. Where noise prevails most roots end on it, so a learning rate
that suits Adam is too large here by about sqrt(Phi / floor). Without noise Phi is 0.
Departs from the paper: Phi is averaged along with v, and so stays exact when sigma, the batches or the cohort change.
Departs from the released code: in nothing known. ``floor_decay`` is its option.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpfed.algorithm import Gradient, Release, Round, require_one_step
from dpfed.flat import Layout
from dpfed.pieces import Corrected, debiased, no_moment, push


@dataclass(frozen=True)
class AdamBC:
    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 0.0
    floor: float = 5e-8
    floor_decay: float = 1.0

    def server_init(self, theta: Tensor, layout: Layout) -> Corrected:
        return Corrected(theta, no_moment(theta), no_moment(theta), no_moment(theta[:1]))

    def client_init(self, s: Corrected, memory: None, t: Round) -> None:
        require_one_step(t)

    def local_step(self, x: None, s: Corrected, grad: Gradient, t: Round, k: int) -> Release:
        return Release(grad(s.theta), grad.noise_var)

    def upload(self, x: Release, s: Corrected, memory: None, t: Round) -> tuple[Release, None]:
        return x, None

    def server_step(self, s: Corrected, u: Release, t: Round) -> Corrected:
        g = u.gradient + self.weight_decay * s.theta
        m, v, phi = push(s.m, g, self.beta1), push(s.v, g * g, self.beta2), push(s.phi, u.phi * t.shrinkage, self.beta2)
        root = debiased(v.mean, phi.mean, floor_abs=self.floor * self.floor_decay**t.index).sqrt() + self.eps
        return Corrected(s.theta - self.lr * t.scale * m.mean / root, m, v, phi)
