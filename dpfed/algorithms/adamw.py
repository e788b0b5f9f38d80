"""AdamW (Loshchilov and Hutter, ICLR 2019, arXiv:1711.05101), with the server stepping; under a private mechanism DP-AdamW
(Chooi et al., ICML 2025 workshop CFAgentic, Alg. 1).

    client       uploads g, the private gradient of one step               l. 3, 4
    server       m <- b1 m + (1-b1) g ; v <- b2 v + (1-b2) g^2             l. 5, 6
                 x <- x - eta (mhat / (sqrt(vhat) + eps) + lambda x)       l. 7 to 9

Departs from the paper: eps stands outside the root, where every implementation has it (``eps_inside=True`` is l. 9 as printed).
Departs from the released code: its QNLI script decays after the step and its batches are not drawn at random; here the decay is
that of torch.optim.AdamW and the accounting is that of the sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpfed.algorithm import Gradient, Release, Round, require_one_step
from dpfed.flat import Layout
from dpfed.pieces import Adaptive, decayed, no_moment, push


@dataclass(frozen=True)
class AdamW:
    lr: float = 1e-3
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_inside: bool = False

    def server_init(self, theta: Tensor, layout: Layout) -> Adaptive:
        return Adaptive(theta, no_moment(theta), no_moment(theta))

    def client_init(self, s: Adaptive, memory: None, t: Round) -> None:
        require_one_step(t)

    def local_step(self, x: None, s: Adaptive, grad: Gradient, t: Round, k: int) -> Release:
        return Release(grad(s.theta), grad.noise_var)

    def upload(self, x: Release, s: Adaptive, memory: None, t: Round) -> tuple[Release, None]:
        return x, None

    def server_step(self, s: Adaptive, u: Release, t: Round) -> Adaptive:
        lr, g = self.lr * t.scale, u.gradient
        m, v = push(s.m, g, self.beta1), push(s.v, g * g, self.beta2)
        root = (v.mean + self.eps).sqrt() if self.eps_inside else v.mean.sqrt() + self.eps
        return Adaptive(decayed(s.theta, lr, self.weight_decay) - lr * m.mean / root, m, v)
