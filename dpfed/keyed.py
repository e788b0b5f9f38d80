"""Random numbers from a key, as a pure function: what a record's own key draws, on any device and in any order of drawing.

A generator has a state, and `torch.vmap` has no room for one per record. Here a key is an int64 tensor, and its numbers are
those of SplitMix64 (Steele, Lea, Flood 2014): the finaliser of key + i * golden. For augmentation and dropout, on which no
guarantee rests; never for noise.

It is written as (key / golden + i) * golden, the same 64 bits, because torch.compile takes i * golden for an address in memory
and gets it wrong (torch 2.13, on a CPU).
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # int64 wraps, so these are the constants of the unsigned original
INVERSE = pow(GOLDEN, -1, 2**64) - 2**64


def fold(key: Tensor, number: Tensor | int) -> Tensor:
    """Another key for every number: of a record in a batch, of one of its augmentations, of a layer.

    >>> fold(torch.tensor(7), 5).equal(fold(torch.tensor(7), torch.tensor(5)))
    True
    """
    return mix((mix(key) * INVERSE + number) * GOLDEN)


def uniform(key: Tensor, num: int, stream: int = 0) -> Tensor:
    """``[...] -> [..., num]`` in [0, 1), float32. Streams of one key have nothing in common: one for each use.

    >>> [round(x, 4) for x in uniform(torch.tensor(7), 3).tolist()]
    [0.7058, 0.4368, 0.8589]
    """
    counters = torch.arange(1, num + 1, device=key.device)
    return _right(mix((fold(key, stream).unsqueeze(-1) * INVERSE + counters) * GOLDEN), 40).float() * 2.0**-24


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64 bits in which every bit of the input moves half of the output's."""
    x = (x ^ _right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Shifted as an unsigned number."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
