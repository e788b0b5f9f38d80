"""FedAdamW (Liu et al., AAAI 2026); under a private mechanism DP-FedAdamW (Liu et al., CVPR 2026, Alg. 1).

    client       m <- 0 ; v <- the server's block means, spread                        l. 6
    local step   m <- b1 m + (1-b1) g ; v <- b2 v + (1-b2) g^2                         l. 13, 14
                 Phi <- (sigma C / B)^2, averaged like v                               eq. 6
                 den = sqrt(max(vhat - Phihat, floor)) + eps                           l. 16, eq. 8
                 y <- (1 - eta lambda) y - eta (mhat / den + gamma D)                  l. 17
    upload       Delta_i = y - x, block means of v                                     l. 19
    server       x <- x + mean Delta_i ; D <- -mean Delta_i / (K eta)                  l. 20, 21

The three repairs are switches. ``aggregate``: which moments the clients inherit ("v" with ``blocks="paper"`` is the paper's
Agg-mean-v, with ``blocks="none"`` its Agg-v; "m" and "mv" its Agg-m and Agg-vm; "none" starts afresh). ``bias_correction``: the
subtraction of Phi. ``gamma``: the alignment. All three off is LocalAdamW, bit for bit; without noise Phi is 0.

Departs from the paper: vhat = v / weight with a weight that travels along with v. The printed v / (1 - b2^k) divides a carried
average as if it began at zero: it is up to 860 times too large and the subtraction of Phi is lost in it
(``v_bias_correction="local"`` is that form). The floor under the root is new (without it half of the roots are of negative
numbers); weight decay shrinks (l. 17 grows); noise is sigma C / B (l. 11 has C twice); D is that of the round before.
Departs from the released code: it has no subtraction of Phi and no blocks, and clips the batch instead of every record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Gradient, Round
from dpfed.flat import BlockRule, Layout
from dpfed.pieces import Moment, debiased, decayed, ema, mean_direction, no_moment, push


class Server(NamedTuple):
    theta: Tensor
    direction: Tensor
    m: Moment
    v: Moment
    phi: Tensor


class Local(NamedTuple):
    theta: Tensor
    m: Moment
    v: Moment
    phi: Tensor


class Upload(NamedTuple):
    delta: Tensor
    m: Moment
    v: Moment
    phi: Tensor


@dataclass(frozen=True)
class FedAdamW:
    """AdamW on the clients, repaired for federations and for noise.

    Args:
        gamma: pull of every local step towards the direction of the round before; 0 is none.
        align: add that direction to the step, or mix it in (convex).
        aggregate: the moments that clients inherit from the server.
        blocks: coordinates that share the second moment they inherit.
        bias_correction: subtract the variance of the noise from the second moment.
        floor_abs: least value of what is left.
        floor_rel: the same, as a part of the noise's variance.
        v_bias_correction: divide by the weight that was averaged, or by 1 - beta2^k as printed (local).
        v_mode: one second moment per coordinate, or one per block all the time.
        decay: of the weights, beside the gradient (decoupled, AdamW) or inside of it (coupled, Adam).
    """

    lr: float = 3e-4
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    gamma: float = 0.5
    align: Literal["additive", "convex"] = "additive"
    aggregate: Literal["none", "m", "v", "mv"] = "v"
    blocks: BlockRule = "paper"
    bias_correction: bool = True
    floor_abs: float = 0.0
    floor_rel: float = 0.05
    v_bias_correction: Literal["tracked", "local"] = "tracked"
    v_mode: Literal["coordinate", "block"] = "coordinate"
    decay: Literal["decoupled", "coupled"] = "decoupled"

    def server_init(self, theta: Tensor, layout: Layout) -> Server:
        nothing = no_moment(theta[:0])
        per_block = theta.new_zeros(layout.blocks(self.blocks).num_blocks)
        m = no_moment(theta) if "m" in self.aggregate else nothing
        v = no_moment(per_block) if "v" in self.aggregate else nothing
        return Server(theta, torch.zeros_like(theta), m, v, theta.new_zeros(1))

    def client_init(self, s: Server, memory: None, t: Round) -> Local:
        m = v = no_moment(s.theta)
        if "m" in self.aggregate:
            m = s.m
        if "v" in self.aggregate:
            v = Moment(t.layout.blocks(self.blocks).spread(s.v.value), s.v.weight)
        if "v" not in self.aggregate or self.v_bias_correction == "local":
            return Local(s.theta, m, Moment(v.value, torch.zeros_like(v.weight)), torch.zeros_like(s.phi))
        return Local(s.theta, m, v, s.phi)

    def local_step(self, x: Local, s: Server, grad: Gradient, t: Round, k: int) -> Local:
        lr, g = self.lr * t.scale, grad(x.theta)
        if self.decay == "coupled":
            g = g + self.weight_decay * x.theta
        square, blocks = g * g, t.layout.blocks(self.blocks)
        if self.v_mode == "block":
            square = blocks.spread(blocks.mean(square))
        m, v, phi = push(x.m, g, self.beta1), push(x.v, square, self.beta2), ema(x.phi, grad.noise_var, self.beta2)
        vhat = v.mean
        if self.bias_correction:
            vhat = debiased(vhat, phi / v.weight, floor_abs=self.floor_abs, floor_rel=self.floor_rel)
        direction = m.mean / (vhat.sqrt() + self.eps)
        own = 1.0 if self.align == "additive" else 1 - self.gamma
        theta = x.theta if self.decay == "coupled" else decayed(x.theta, lr, self.weight_decay)
        return Local(theta - lr * (own * direction + self.gamma * s.direction), m, v, phi)

    def upload(self, x: Local, s: Server, memory: None, t: Round) -> tuple[Upload, None]:
        m = x.m if "m" in self.aggregate else s.m
        v = Moment(t.layout.blocks(self.blocks).mean(x.v.value), x.v.weight) if "v" in self.aggregate else s.v
        return Upload(x.theta - s.theta, m, v, x.phi), None

    def server_step(self, s: Server, u: Upload, t: Round) -> Server:
        direction = mean_direction(u.delta, self.lr * t.scale, t.num_steps, otherwise=s.direction)
        return Server(s.theta + u.delta, direction, u.m, u.v, u.phi)
