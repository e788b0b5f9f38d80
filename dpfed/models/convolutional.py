"""Convolutional networks of the papers, for pictures of 32 pixels: with group norm, because batch norm mixes records.

Their weights are torch's usual ones, drawn by key.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn

from dpfed.data import key
from dpfed.errors import InputError


@contextmanager
def seeded(seed: int, purpose: str) -> Generator[None]:
    """Within, what torch draws for new weights is keyed; outside, its state is what it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, purpose))
        yield


class Residual(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al. 2015, arXiv 1512.03385)."""

    def __init__(self, inside: int, outside: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.GroupNorm(groups, outside)
        self.conv2, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.GroupNorm(groups, outside)
        shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False), nn.GroupNorm(groups, outside)
        self.shortcut = nn.Sequential(*shortcut) if stride > 1 or inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (inner + self.shortcut(x)).relu()


class PreactivatedResidual(nn.Module):
    """Norm and activation before each convolution (Zagoruyko, Komodakis 2016, arXiv 1605.07146)."""

    def __init__(self, inside: int, outside: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inside), nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outside), nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False) if inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.norm1(x).relu()
        inner = self.conv2(self.norm2(self.conv1(active)).relu())
        return inner + (x if self.shortcut is None else self.shortcut(active))


class Mean(nn.Module):
    """Over the places of a picture: ``[n, C, h, w] -> [n, C]``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def resnet18(num_classes: int, *, groups: int = 2, width: int = 64, num_channels: int = 3, seed: int = 0) -> nn.Module:
    """GN-ResNet-18 of the DP-FedAdamW paper, with the stem for 32 pixels: one 3 x 3 convolution, no pooling.

    The paper does not say how many groups; 2 is what its released code has. 11,173,962 parameters for 10 classes.
    """
    _check_groups(groups, width)
    widths = [width * 2**stage for stage in range(4)]
    with seeded(seed, "theta0"):
        stem = nn.Conv2d(num_channels, width, 3, 1, 1, bias=False), nn.GroupNorm(groups, width), nn.ReLU()
        blocks = [Residual(a, b, 1 + (b > a), groups) for a, b in pairwise([width, *(w for w in widths for _ in range(2))])]
        return nn.Sequential(*stem, *blocks, Mean(), nn.Linear(widths[-1], num_classes))


def wide_resnet(
    num_classes: int, *, depth: int = 16, factor: int = 4, groups: int = 16, num_channels: int = 3, seed: int = 0
) -> nn.Module:
    """WRN-16-4 with group norm, as DP-MicroAdam trains it; 2,748,890 parameters for 10 classes.

    The released code of DP-MicroAdam also standardises the weights and puts the norm behind the activation; this is the
    network of the paper that it comes from, with 16 groups instead of batch norm.
    """
    if depth < 10 or (depth - 4) % 6:
        raise InputError(f"depth: must be 6 n + 4 with n of at least 1, got {depth}. 16, 28 and 40 are usual.")
    _check_groups(groups, 16)
    num_blocks, widths = (depth - 4) // 6, [16 * factor * 2**stage for stage in range(3)]
    with seeded(seed, "theta0"):
        places = pairwise([16, *(w for w in widths for _ in range(num_blocks))])
        blocks = [PreactivatedResidual(a, b, 1 + (b > a and b > widths[0]), groups) for a, b in places]
        end = nn.GroupNorm(groups, widths[-1]), nn.ReLU(), Mean(), nn.Linear(widths[-1], num_classes)
        return nn.Sequential(nn.Conv2d(num_channels, 16, 3, 1, 1, bias=False), *blocks, *end)


def tanh_cnn(num_classes: int = 10, *, num_channels: int = 3, seed: int = 0) -> nn.Module:
    """The CNN of five layers of the DP-AdamW paper, without norms; 411,466 parameters for 10 classes.

    The paper states neither widths nor activation; these are those of the code that it starts from (DP-AdamBC).
    """
    widths = [num_channels, 32, 64, 128, 256, num_classes]
    with seeded(seed, "theta0"):
        layers: list[nn.Module] = []
        for stage, (a, b) in enumerate(pairwise(widths)):
            layers.append(nn.Conv2d(a, b, 3, padding=int(stage > 0)))
            layers += [nn.Tanh()] if stage < 4 else [Mean()]
            layers += [nn.MaxPool2d(2)] if stage < 3 else []
        return nn.Sequential(*layers)


def _check_groups(groups: int, narrowest: int) -> None:
    if groups < 1 or narrowest % groups:
        raise InputError(f"groups: must divide the {narrowest} channels of the narrowest layer, got {groups}. Try 2, 8 or 16.")
