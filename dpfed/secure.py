"""Noise for deployments: from the operating system's secure generator, exact, and on a grid that does not depend on the data.

Floating-point noise gives the data away: not every double can be reached, and which ones can depends on the number that the
noise was added to (Mironov 2012; Holohan and Braghin 2021, arXiv 2107.10138). Here everything is a whole number until the end.

Formal guarantee. Let g = std / 2^32 be the grid, m the clipped sum in whole multiples of g, Z exactly normal. Released is
m + floor(2^32 Z) = floor(m + 2^32 Z), as m is whole: post-processing of the Gaussian mechanism on m, so the ledger's analysis
holds as it stands, without a further delta; the last step, from the grid to the dtype of the sum, is post-processing too.
Rounding moves each of d coordinates by up to g / 2, so one record moves m g by up to clip + g sqrt(d), where the sum itself was
right; `noise_std` pays for that, and `secure_sum` for a sum that was computed in floating point. It holds for one release on
its own: of several clients' releases, each on its grid, the sum is no such release. The reasons, and what is still assumed, are
in docs/adr/0005-secure-noise.md.

The sampler is Karney's (2016, arXiv 1303.6257), which is exact because it only looks at the digits it needs. |Z| = k + x has
the density exp(-k^2 / 2) exp(-x (k + x / 2)): draw k by the first factor and the first 32 bits of x uniformly, keep them with
the second factor as probability. All of it is decided by the first digits of k, x and a coin, in doubles, where no further
digit and no rounding error could change the answer; otherwise (once in 5,000) more digits are drawn and 50 decimals are used.
That leaves an error of less than 2^-100 a coordinate, so less than 2^-50 of delta for ever.
"""

from __future__ import annotations

import math
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.errors import InputError

GRID_BITS = 32  # the noise has 2^32 grid points to a standard deviation
CHUNK = 2**15  # candidates at a time: they stay in the cache
MARGIN = 2.0**-10  # in units of the coin's last digit, 2^-16: what x's missing digits (2^-13) and rounding (2^-34) can do
LARGEST = 2.0**51  # in grid points: sums and noise up to here are whole numbers in a double, and so are their totals
SLACK = {torch.float32: 2.0**-10, torch.float64: 2.0**-30}  # of the clip: what clipping and summing in this dtype may be off by


def _thresholds() -> list[int]:
    """Where k = 0, 1, ... 15 end on the unit interval, in 128 bits; what lies beyond has probability 2^-184."""
    with localcontext() as context:
        context.prec = 60
        weights = [(Decimal(-k * k) / 2).exp() for k in range(16)]
        return [int(end / sum(weights) * 2**128) for end in accumulate(weights)]


ENDS = _thresholds()
FIRST_DIGITS = np.searchsorted(np.array([end >> 113 for end in ENDS]), np.arange(2**15), side="right").astype(np.uint8)
FIRST_DIGITS[[min(end >> 113, 2**15 - 1) for end in ENDS]] = 255  # a threshold lies inside: the first 15 bits do not tell k


def secure_integers(num: int) -> Tensor:
    """``num`` independent draws of floor(2^32 Z), Z standard normal, as int64. No seed, no state, never the same again."""
    drawn = np.empty(num, np.int64)
    filled = 0
    while filled < num:
        num_candidates = min(CHUNK, 64 + (num - filled) * 3 // 2)
        fresh = _accepted(np.frombuffer(os.urandom(8 * num_candidates), np.uint8))[: num - filled]
        drawn[filled : filled + len(fresh)] = fresh
        filled += len(fresh)
    return torch.from_numpy(drawn)


def secure_normal(shape: int | tuple[int, ...], std: float = 1.0) -> Tensor:
    """Float64 normal noise: whole multiples of std / 2^32. To release a sum use `secure_sum`: it keeps sum and noise whole."""
    _check_std(std)
    shape = (shape,) if isinstance(shape, int) else shape
    return secure_integers(math.prod(shape)).reshape(shape).double() * (std / 2**GRID_BITS)


def secure_uniform(num: int) -> Tensor:
    """``num`` independent numbers in [0, 1), float64, in steps of 2^-53: the coins of a batch that nobody can draw again."""
    return torch.from_numpy((np.frombuffer(os.urandom(8 * num), np.uint64) >> 11) * 2.0**-53)


def secure_noise(sigma: float) -> Callable[[Tensor, Tensor | float, int, int], Tensor]:
    """The ``noise`` of a `PrivateGradient` in a deployment: of multiplier ``sigma``, by `secure_sum`, and never keyed.

    >>> secure_noise(2.0)(torch.zeros(1, 3), 2.0, 0, 0).shape
    torch.Size([1, 3])
    """
    noise_std(sigma, 1.0, 1)  # refuses what is no noise

    def noise(total: Tensor, std: Tensor | float, draw: int, query: int) -> Tensor:
        stds = torch.as_tensor(std, dtype=torch.float64).expand(len(total), 1)
        return torch.stack([secure_sum(row, sigma, float(own) / sigma) for row, own in zip(total, stds, strict=True)])

    return noise


def noise_std(sigma: float, clip: float, d: int, dtype: torch.dtype = torch.float64) -> float:
    """The noise that makes ``sigma`` true after rounding: std = sigma (clip (1 + SLACK) + sqrt(d) g), where g = std / 2^32.

    >>> noise_std(1.0, 1.0, 10_000_000) - 1 < 2e-6
    True
    """
    if dtype not in SLACK:
        raise InputError(f"noise: a sum in {dtype} is not exact enough to be protected. Train in float32 or float64.")
    loss = sigma * math.sqrt(d) * 1.5 * 2.0**-GRID_BITS  # 1.5 for 1: the quotient that is rounded is off by up to g / 8
    if not (0 < sigma < math.inf and 0 < clip < math.inf and d >= 1 and loss < 0.5):
        raise InputError(
            f"noise: sigma {sigma}, clip {clip} and {d} coordinates do not make a private release. Sigma and clip must be "
            "finite and above 0; the grid carries sigma * sqrt(d) up to a thousand million."
        )
    std, limits = sigma * clip * (1 + SLACK[dtype]) / (1 - loss), torch.finfo(dtype)
    _check_std(std)
    if not limits.tiny / limits.eps < std / 2**GRID_BITS < std < limits.max * limits.eps:
        raise InputError(f"noise: a deviation of {std:g} is beyond what {dtype} can carry. Choose a clip nearer to 1.")
    return std


def secure_sum(total: Tensor, sigma: float, clip: float) -> Tensor:
    """Release a sum of records clipped to ``clip``, ``[d]`` or one row a client, with noise of multiplier ``sigma``.

    The noise is `noise_std` large, a hair above sigma * clip (a thousandth in float32). The result has the dtype of ``total``,
    to which the exact number on the grid is rounded at the very end. A coordinate beyond 500,000 deviations is cut off there,
    before the noise, which adds nothing to the sensitivity. A clipped sum holds no NaN; should one come, it counts as zero.
    """
    grid = noise_std(sigma, clip, total.shape[-1], total.dtype) / 2**GRID_BITS
    points = total.detach().cpu().double().div(grid).nan_to_num(0.0, LARGEST, -LARGEST).clamp(-LARGEST, LARGEST).round().long()
    released = points + secure_integers(total.numel()).reshape(total.shape)
    return (released.double() * grid).to(total)


def _accepted(random: Any) -> Any:
    """What becomes of the candidates made of these bytes, eight each: the accepted ones, as floor(2^32 Z)."""
    x, coin, digit, negative = _digits(random)
    k = FIRST_DIGITS[digit]
    rest = x * 2.0**-32
    room = np.exp(-rest * (k + rest / 2)) * 2.0**16 - coin  # how far the coin's first digit lies below the probability
    keep = room >= 1 + MARGIN
    for index in np.flatnonzero((k == 255) | ((room > -MARGIN) & ~keep)):
        settled = _settled(int(x[index]), int(coin[index]), int(digit[index]))
        keep[index] = settled is not None
        k[index] = settled or 0
    size = (k[keep].astype(np.int64) << 32) | x[keep]
    return size ^ -negative[keep].astype(np.int64)  # floor(-z) is -floor(z) - 1, which is ~floor(z): the xor with -1


def _digits(random: Any) -> tuple[Any, Any, Any, Any]:
    """The bytes as numbers: 32 bits of x, 16 of the coin, 15 of k, and the sign."""
    num = len(random) // 8
    last = random[6 * num :].view(np.uint16)
    return random[: 4 * num].view(np.uint32), random[4 * num : 6 * num].view(np.uint16), last >> 1, last & 1


def _settled(x: int, coin: int, digit: int) -> int | None:
    """The candidate of these first digits, decided with a hundred more of each: its k, or None if it is rejected."""
    k = bisect_right(ENDS, digit << 113 | secrets.randbits(113))
    with localcontext() as context:
        context.prec = 50
        rest = Decimal(x << 96 | secrets.randbits(96)) / 2**128
        probability = (-rest * (k + rest / 2)).exp()
        return k if (coin << 112 | secrets.randbits(112)) < probability * 2**128 else None


def _check_std(std: float) -> None:
    if not 2.0**-900 < std < 2.0**900:
        raise InputError(f"noise: the standard deviation must be a number above 0 and finite, got {std}.")
