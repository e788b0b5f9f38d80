"""The only file that sees raw gradients.

A gradient leaves this file clipped per record, summed, noised and divided by the *expected* batch size, or not at all. What
the algorithms get is ``grad(theta)``; every call is counted, and the count becomes the receipt.

Formal guarantee. Let the batch hold every record of a client independently with probability q (``sampling="poisson"``). Then
one call releases  sum_j clip_C(grad l_j) + N(0, (sigma C)^2 I),  whose L2 sensitivity to adding or removing one record is C: a
Poisson-subsampled Gaussian mechanism of multiplier sigma. With ``sampling="fixed"`` neighbours replace one record, the
sensitivity is 2C, and the ledger charges sigma / 2. Two calls on the same batch are one Gaussian of multiplier
sigma / sqrt(2) inside the same subsampling, and are charged as such.

``clipping`` chooses the map clip_C. Each bounds what one record moves the sum by (to C), so the guarantee is the same:
    flat        g min(1, C / |g|)
    block       the same for each of the L tensors of the model, with C / sqrt(L)
    automatic   g C / (|g| + 0.01)                                              Bu et al. 2022, arXiv 2206.07136
    adaptive    flat, with a threshold that follows a quantile of the norms: C <- C exp(-0.2 (b - quantile)) once a round,
                b the noised share of gradients within C                        Andrew et al. 2021, arXiv 1905.03871
That share is paid for: every call then releases a pair, the sum and the number of gradients within C less half of all, which
one record moves by 1/2. The number, in units of w, is one coordinate more of the sum; together one record moves them by
C / sqrt(1 - 0.01), and the noise is sigma times that. So with sigma_g C on the sum and sigma_b on the number the pair is one
Gaussian mechanism of multiplier sigma, 1 / sigma^2 = 1 / sigma_g^2 + 1 / (2 sigma_b)^2, and is charged as such.

``unit="client"`` protects whole clients (McMahan et al. 2018, arXiv 1710.06963). Gradients are plain; a client's upload is
clipped to C over all of its fields together; the server sums, adds N(0, (sigma C)^2 I) once a round, and divides by the
expected size of a cohort. When every client joins with probability q of its own, that is a Poisson-subsampled Gaussian
mechanism over clients.
``unit="batch"`` is the released code of DP-FedAdamW, and protects nobody: see `AsReleased`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpfed.flat import Records
from dpfed.keyed import fold
from dpfed.mechanism import AsReleased as AsReleased
from dpfed.mechanism import Clipping, Unit, calibrated_sigma, count_weight, reach
from dpfed.mechanism import Gaussian as Gaussian
from dpfed.mechanism import Mechanism as Mechanism
from dpfed.mechanism import Plain as Plain
from dpfed.mechanism import events as events
from dpfed.mechanism import expected_size as expected_size
from dpfed.mechanism import protection as protection

Loss = Callable[[Tensor, Records], Tensor]
ALL = slice(None)
BLOCK = 512  # squares that are added up in the dtype of the gradients; what is beyond in float64
STABLE = 0.01  # automatic clipping: added to the norm, so that a gradient near 0 is not blown up
CLIP_STEP = 0.2  # adaptive clipping: of the logarithm of the threshold, for a share that is off by 1


class Part(NamedTuple):
    """Some columns of a batch: of all clients, or (overflow of a Poisson batch) of those clients in ``rows`` only."""

    examples: Records
    mask: Tensor
    rows: Tensor | None = None


class PrivateGradient:
    """The gradient of one local step of S clients, as a function of ``theta``: the algorithms' only view of the data.

    ``noise_var`` is the public variance (sigma C / B)^2 of every coordinate, one row a client; 0 where clients are the unit,
    because the noise comes later. ``grad(theta, draw=1)`` asks for a further, independent batch of the same step. ``queries``
    counts the calls by draw; what was counted is charged. ``within`` is, under adaptive clipping, the noised share of gradients
    within the threshold, less 1/2, summed over the calls.

    ``noise(sum, std, draw, query)`` gives the sum with noise of that standard deviation. ``clip`` is this round's threshold,
    ``factors`` are what sigma is multiplied by for each client, ``tensors`` the sizes of the model's tensors.
    """

    def __init__(
        self,
        loss: Loss,
        batch: Callable[[int], list[Part]],
        noise: Callable[[Tensor, Tensor | float, int, int], Tensor],
        sizes: Tensor,
        mechanism: Mechanism,
        cohort_size: int = 1,
        *,
        clip: float | None = None,
        factors: Tensor | float = 1.0,
        tensors: Sequence[int] = (),
    ) -> None:
        self._loss, self._batch, self._noise, self._sizes = _varied(loss, mechanism.augmentations), batch, noise, sizes
        self._unit: Unit = mechanism.unit
        self._clipping: Clipping = "flat" if mechanism.unit == "client" else mechanism.clipping  # there, uploads are clipped
        self._clip, self._tensors = mechanism.clip if clip is None else clip, tensors
        self._noisy = bool(mechanism.sigma) and mechanism.unit != "client"
        self._noise_std: Tensor | float = 0.0
        if mechanism.sigma and self._noisy:
            share = math.sqrt(cohort_size) if mechanism.noise == "distributed" else 1.0
            self._noise_std = mechanism.sigma * reach(self._clipping, self._clip) / share * factors
        self.noise_var = (self._noise_std / sizes) ** 2
        self.queries: Counter[int] = Counter()
        self.within = torch.zeros_like(sizes)

    def __call__(self, theta: Tensor, *, draw: int = 0, minus: tuple[float, Tensor] | None = None, only: slice = ALL) -> Tensor:
        """``[d]`` or ``[S, d]`` -> ``[S, d]``: clipped per record, summed, noised, divided by the expected size.

        ``minus=(c, other)`` releases the difference g(theta) - c g(other) of every record's gradients, clipped as one.
        ``only`` releases the gradient of some (public) coordinates: restricted before it is clipped, ``[S, n]``.
        """
        query = self.queries[draw]
        self.queries[draw] += 1
        theta = theta.expand(len(self._sizes), theta.shape[-1])
        points = [(1.0, theta)] if minus is None else [(1.0, theta), (-minus[0], minus[1].expand_as(theta))]
        total = self._sum(draw, points, only)
        if self._unit == "batch":
            total = self._sizes * clipped_tensors(total / self._sizes, self._clip, tensors_within(self._tensors, only))
        if self._noisy:
            total = self._noise(total, self._noise_std, draw, query)
        mean = total / self._sizes
        if self._clipping == "adaptive":
            mean, count = mean[..., :-1], mean[..., -1:]
            self.within = self.within + count / count_weight(self._clip)
        return mean

    def _sum(self, draw: int, points: Points, only: slice) -> Tensor:
        """Over the batch. Under adaptive clipping the count stands behind the gradients, as one coordinate more."""
        theta = points[0][1][..., only]
        total = theta.new_zeros(len(theta), theta.shape[-1] + (self._clipping == "adaptive"))
        tensors = tensors_within(self._tensors, only) if self._clipping == "block" else None
        for examples, mask, rows in self._batch(draw):
            here = points if rows is None else [(factor, point[rows]) for factor, point in points]
            if self._unit != "example" or math.isinf(self._clip):
                part = plain_sum(self._loss, here, examples, mask, only)
            else:
                part, norms = clipped_sum(self._loss, here, examples, mask, self._clip, self._clipping, tensors, only)
                if self._clipping == "adaptive":
                    count = (_within(norms, self._clip) * mask).sum(-1, keepdim=True)
                    part = torch.cat([part, count_weight(self._clip) * count], dim=-1)
            total = total + part if rows is None else total.index_add(0, rows, part)
        return total


Points = Sequence[tuple[float, Tensor]]
"""Where gradients are taken, each with its public factor."""


def clipped_sum(
    loss: Loss,
    points: Points,
    examples: Records,
    mask: Tensor,
    clip: float,
    clipping: Clipping = "flat",
    tensors: list[int] | None = None,
    only: slice = ALL,
) -> tuple[Tensor, Tensor]:
    """``[S, d]``: for every client the sum over its batch of the records' gradients, each clipped; and their norms ``[S, B]``.

    ``tensors``: the sizes of what is clipped by itself, where that is not the whole gradient. A gradient that is not finite
    counts as zero: it moves the sum by nothing, so the sensitivity holds for it too.
    """
    with torch.no_grad():
        per_record = vmap(vmap(grad(loss), in_dims=(None, 0)))
        (_, theta), *others = points  # the first factor is 1
        grads = cast(Tensor, per_record(theta, examples))
        for factor, other in others:
            grads = grads + factor * cast(Tensor, per_record(other, examples))
        grads = grads[..., only]
        pieces = grads.split(tensors, dim=-1) if tensors else (grads,)
        bound, sums = clip / math.sqrt(len(pieces)), list[Tensor]()
        norms = [lengths(piece) for piece in pieces]
        for piece, norm in zip(pieces, norms, strict=True):
            usable = norm.isfinite() & mask
            scale = torch.where(usable, shrinkage(norm, bound, clipping), 0)
            sums.append(torch.einsum("sb,sbd->sd", scale, piece.masked_fill_(~usable.unsqueeze(-1), 0)))
        return torch.cat(sums, dim=-1), torch.linalg.vector_norm(torch.stack(norms), dim=0)


def lengths(x: Tensor) -> Tensor:
    """The L2 norms over the last axis. In float32 a sum over millions of squares would be off by half a percent, and the clip
    with it; block by block it is right to 2^-16."""
    num_blocks = x.shape[-1] // BLOCK
    whole = x[..., : num_blocks * BLOCK].unflatten(-1, (num_blocks, BLOCK))
    rest = x[..., num_blocks * BLOCK :]
    both = torch.cat([torch.linalg.vector_norm(whole, dim=-1), rest], dim=-1)
    return torch.linalg.vector_norm(both.double(), dim=-1).to(x.dtype)


def shrinkage(norms: Tensor, clip: float, clipping: Clipping) -> Tensor:
    """What a vector of this norm is multiplied with, so that its norm is ``clip`` at most."""
    return clip / (norms + STABLE) if clipping == "automatic" else (clip / norms).clamp(max=1)


def _within(norms: Tensor, clip: float) -> Tensor:
    """1/2 for a norm within the threshold, -1/2 for one beyond it, or that is not finite."""
    return (norms <= clip).to(norms.dtype) - 0.5


def tensors_within(tensors: Sequence[int], only: slice) -> list[int]:
    """The sizes of the tensors, as far as they lie inside a range of coordinates.

    >>> tensors_within([2, 3, 4], slice(2, 6))
    [3, 1]
    """
    start, stop, _ = only.indices(sum(tensors))
    ends = [min(max(end, start), stop) for end in accumulate(tensors, initial=0)]
    return [after - before for before, after in pairwise(ends) if after > before]


def clipped_tensors(x: Tensor, clip: float, tensors: list[int]) -> Tensor:
    """Every tensor inside ``x`` clipped by itself to the whole of ``clip``, as the released code does it."""
    pieces = x.split(tensors, dim=-1)
    norms = [torch.linalg.vector_norm(piece, dim=-1, keepdim=True) for piece in pieces]
    return torch.cat([piece * shrinkage(norm, clip, "flat") for piece, norm in zip(pieces, norms, strict=True)], dim=-1)


def _varied(loss: Loss, num: int) -> Loss:
    """The mean loss over ``num`` variants of a record, so that its gradient is the mean of theirs before it is clipped."""
    if num == 1:
        return loss

    def mean_loss(theta: Tensor, example: Records) -> Tensor:
        keys = fold(example["key"], torch.arange(num, device=theta.device))

        def variant(key: Tensor) -> Tensor:
            return loss(theta, example | {"key": key})

        return vmap(variant)(keys).mean()

    return mean_loss


def plain_sum(loss: Loss, points: Points, examples: Records, mask: Tensor, only: slice = ALL) -> Tensor:
    """``[S, d]``: the sum of the gradients without clipping, never materialised per record. Not private."""

    def total(theta: Tensor, examples: Records, mask: Tensor) -> Tensor:
        losses = vmap(loss, in_dims=(None, 0))(theta, examples)
        return torch.where(mask, losses, 0).sum()

    with torch.no_grad():
        sums = [factor * vmap(grad(total))(theta, examples, mask) for factor, theta in points]
        return torch.stack(sums).sum(0)[:, only]


Fields = Mapping[str, Tensor]


def clipped_upload(fields: Fields, clip: float, clipping: Clipping) -> tuple[dict[str, Tensor], Tensor]:
    """The fields of S clients' uploads, each client's clipped as one vector; and for each 1/2 where it was within, else -1/2.

    An upload that is not finite counts as zero.
    """
    norms = lengths(torch.cat(list(fields.values()), dim=-1)).unsqueeze(-1)
    usable = norms.isfinite()
    scale = torch.where(usable, shrinkage(norms, clip, clipping), 0)
    return {name: scale * field.where(usable, 0) for name, field in fields.items()}, _within(norms, clip)


def noised_upload(
    fields: Fields, mechanism: Mechanism, clip: float | None, cohort: int, random: torch.Generator
) -> dict[str, Tensor]:
    """The fields of a sum of clipped uploads over ``cohort``, its expected size, with the noise of a round.

    With a threshold ``clip`` of adaptive clipping, the last field is the number of those within it.
    """
    scale, whole = mechanism.clip if clip is None else clip, torch.cat(list(fields.values()))
    units = torch.ones_like(whole)
    if clip is not None:
        units[-1] = count_weight(clip)
    std = calibrated_sigma(mechanism) * reach(mechanism.clipping, scale) / cohort
    noised = whole + std / units * torch.randn(len(whole), generator=random, dtype=whole.dtype, device=whole.device)
    return dict(zip(fields, noised.split([len(field) for field in fields.values()]), strict=True))


def next_clip(clip: float, within: float, quantile: float) -> float:
    """The threshold of the next round: lower where more than the quantile of gradients were within this one's.

    >>> round(next_clip(1.0, 0.9, 0.5), 4), next_clip(1.0, 0.5, 0.5)
    (0.9231, 1.0)
    """
    return clip * math.exp(-CLIP_STEP * (min(max(within, 0.0), 1.0) - quantile))
