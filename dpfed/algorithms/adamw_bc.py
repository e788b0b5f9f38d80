"""AdamWBC (Chooi et al., ICML 2025 workshop CFAgentic, Alg. 2), with the server stepping; in the paper DP-AdamW-BC.

    client       uploads g and its noise variance Phi                      l. 3, 4
    server       m <- b1 m + (1-b1) g ; v <- b2 v + (1-b2) g^2             l. 5, 6
                 x <- x - eta (mhat / sqrt(max(vhat - Phihat, floor)) + lambda x)        l. 7 to 9

AdamW with the second moment of AdamBC. ``floor`` is the gamma of l. 9.
Departs from the paper: Phi is that of the mean over the cohort, and is averaged along with v: see AdamBC.
Departs from the released code: it adds 1e-8 to the root (``eps``).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpfed.algorithm import Gradient, Release, Round, require_one_step
from dpfed.flat import Layout
from dpfed.pieces import Corrected, debiased, decayed, no_moment, push


@dataclass(frozen=True)
class AdamWBC:
    lr: float = 1e-3
    weight_decay: float = 0.01
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
        lr, g = self.lr * t.scale, u.gradient
        m, v, phi = push(s.m, g, self.beta1), push(s.v, g * g, self.beta2), push(s.phi, u.phi * t.shrinkage, self.beta2)
        root = debiased(v.mean, phi.mean, floor_abs=self.floor * self.floor_decay**t.index).sqrt() + self.eps
        return Corrected(decayed(s.theta, lr, self.weight_decay) - lr * m.mean / root, m, v, phi)
