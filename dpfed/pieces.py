"""Pure functions on vectors, the words in which the algorithms are written. All work on the last axis."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Schedule = Literal["cosine", "constant", "linear"]


def schedule_scale(schedule: Schedule, t: int, num_rounds: int, num_warmup: int = 0) -> float:
    """The factor on the learning rate in round ``t``: the papers' cosine (per round), with a linear warm-up before it.

    >>> [round(schedule_scale("cosine", t, 4), 3) for t in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    >>> [schedule_scale("constant", t, 4, num_warmup=2) for t in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    if t < num_warmup:
        return (t + 1) / num_warmup
    done = (t - num_warmup) / max(1, num_rounds - num_warmup)
    return {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[schedule]


class Moment(NamedTuple):
    """A moving average that carries its own weight, so that ``value / weight`` is unbiased wherever it began.

    >>> moment = Moment(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    >>> for g in (0.5, -1.0, 2.0):
    ...     moment = push(moment, torch.tensor([g]).double() ** 2, 0.999)
    >>> round(float(moment.value / moment.weight), 6)
    1.751251
    """

    value: Tensor
    weight: Tensor


def no_moment(like: Tensor) -> Moment:
    """Nothing averaged yet."""
    return Moment(torch.zeros_like(like), like.new_zeros(1))


def push(moment: Moment, new: Tensor, beta: float) -> Moment:
    """One step of the moving average, of the value and of its weight."""
    return Moment(ema(moment.value, new, beta), beta * moment.weight + (1 - beta))


def ema(old: Tensor, new: Tensor, beta: float) -> Tensor:
    return beta * old + (1 - beta) * new


def debiased(second: Tensor, noise_var: Tensor, *, floor_abs: float, floor_rel: float) -> Tensor:
    """The second moment of the signal alone: E[g^2] = signal + noise_var, never below a floor.

    Without noise the floor falls to ``floor_abs``, and this is the plain second moment.
    """
    return torch.maximum(second - noise_var, (floor_rel * noise_var).clamp(min=floor_abs))


def decayed(theta: Tensor, lr: float, weight_decay: float) -> Tensor:
    """Decoupled weight decay: the parameters shrink. (The papers print the sign that makes them grow.)"""
    return (1 - lr * weight_decay) * theta
