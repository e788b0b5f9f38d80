"""MicroAdam (Modoranu et al., NeurIPS 2024, arXiv:2405.15593), with the server stepping; under a private mechanism DP-MicroAdam
(Hudisteanu, Kalinin and Cyffers, 2025, arXiv:2511.20509).

    client       uploads g, the private gradient of one step
    server       a <- g + Q^-1(e)                                tensor by tensor, as everything here
                 I, V <- the top ``density`` of |a| ; a[I] <- 0 ; (I, V) replaces the oldest of ``window`` slots
                 e <- Q(a)                                       4 bits a coordinate, blocks of ``quant_block``
                 mhat = (1-b1) / (1-b1^t) sum over slots of b1^age V ; vhat alike, of b2 and V^2
                 x <- (1 - eta lambda) x - eta mhat / (eps + sqrt(vhat))

The server remembers about 1.16 bytes a coordinate instead of Adam's 8: e takes 1/2, the ends of its blocks 4 / 64, a slot 6
for a kept coordinate (int32, bfloat16; ends and V are float64 where the parameters are). All of it works on what is private
already. In the long run steps are about 5 times Adam's, as a window of fewer than t steps does not weigh 1 - b^t;
``bias_correction="window"`` takes min(t, window) for t.

Departs from the paper: a constant block has codes 0 (its Q divides by 0); weight decay is new, and off by default.
Departs from the released code: that of DP-MicroAdam does not quantise e (``ef_bits=None``), and divides by the realised batch
size; MicroAdam's takes the top of every piece of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from dpfed.algorithm import Gradient, Release, Round, require_one_step
from dpfed.errors import InputError
from dpfed.flat import Layout
from dpfed.pieces import (
    Quantised,
    Ring,
    decayed,
    dequantise,
    empty_ring,
    has_kernels,
    move_top,
    no_error,
    quantise,
    ring_moments,
)


class Server(NamedTuple):
    theta: Tensor
    error: Quantised | Tensor
    ring: Ring


@dataclass(frozen=True)
class MicroAdam:
    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    density: float = 0.01
    window: int = 10
    ef_bits: Literal[4] | None = 4
    quant_block: int = 64
    bias_correction: Literal["paper", "window"] = "paper"

    def server_init(self, theta: Tensor, layout: Layout) -> Server:
        if not 0 < self.density <= 1:
            raise InputError(f"algorithm.density: must lie above 0 and not above 1, got {self.density}. The paper has 0.01.")
        if self.window < 1:
            raise InputError(f"algorithm.window: must be at least 1, got {self.window}. The paper has 10.")
        if self.quant_block < 2 or self.quant_block % 2:
            raise InputError(f"algorithm.quant_block: must be even, as two codes share a byte, got {self.quant_block}. Use 64.")
        error = no_error(theta, layout.sizes, self.quant_block) if self.ef_bits else torch.zeros_like(theta)
        return Server(theta, error, empty_ring(theta, layout.sizes, self.density, self.window))

    def client_init(self, s: Server, memory: None, t: Round) -> None:
        require_one_step(t)

    def local_step(self, x: None, s: Server, grad: Gradient, t: Round, k: int) -> Release:
        return Release(grad(s.theta), grad.noise_var)

    def upload(self, x: Release, s: Server, memory: None, t: Round) -> tuple[Release, None]:
        return x, None

    def server_step(self, s: Server, u: Release, t: Round) -> Server:
        lr, sizes, num_steps = self.lr * t.scale, t.layout.sizes, t.index + 1
        if has_kernels(self.ef_bits, self.quant_block, (s.theta, u.gradient)):
            from dpfed.kernels import micro_adam  # here, as it needs triton: on a GPU, what follows in ten launches

            return Server(*micro_adam(self, t.index, lr, s.theta, u.gradient, cast(Quantised, s.error), s.ring, sizes))
        a = u.gradient + dequantise(s.error, sizes, self.quant_block, s.theta.dtype)
        a, ring = move_top(a, s.ring, t.index % self.window, self.window, sizes, self.density)
        error = quantise(a, sizes, self.quant_block) if self.ef_bits else a
        ages = [(t.index - slot) % self.window for slot in range(self.window)]
        counted = num_steps if self.bias_correction == "paper" else min(num_steps, self.window)
        first, second = ([(1 - beta) / (1 - beta**counted) * beta**age for age in ages] for beta in (self.beta1, self.beta2))
        mhat, vhat = ring_moments(ring, first, second, a)
        theta, moved = decayed(s.theta, lr, self.weight_decay), ring.places.long()
        return Server(theta.index_put((moved,), theta[moved] - lr * mhat / (self.eps + vhat.sqrt())), error, ring)
