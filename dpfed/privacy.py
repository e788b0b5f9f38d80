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
That share is paid for: every call then releases a pair, the sum with noise sigma_g C, and with noise sigma_b the number of
gradients within C less half of all, which one record moves by 1/2. The pair is one Gaussian mechanism of multiplier sigma,
1 / sigma^2 = 1 / sigma_g^2 + 1 / (2 sigma_b)^2, and is charged as such; the number takes a hundredth of the left side.

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
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpfed.flat import Records
from dpfed.keyed import fold
from dpfed.mechanism import AsReleased as AsReleased
from dpfed.mechanism import Clipping, Noise, Unit, calibrated_sigma
from dpfed.mechanism import Gaussian as Gaussian
from dpfed.mechanism import Mechanism as Mechanism
from dpfed.mechanism import Plain as Plain
from dpfed.mechanism import events as events
from dpfed.mechanism import expected_size as expected_size
from dpfed.mechanism import protection as protection

Loss = Callable[[Tensor, Records], Tensor]
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
    counts the calls by draw; what was counted is charged. ``within`` has one column under adaptive clipping, the noised share
    of gradients within the threshold, less 1/2, summed over the calls; else it has none.

    ``noise(draw, query)`` is standard normal, ``[S, d]`` and those columns. ``clip`` is this round's threshold, ``factors``
    are what sigma is multiplied by for each client, ``tensors`` the sizes of the model's tensors.
    """

    def __init__(
        self,
        loss: Loss,
        batch: Callable[[int], list[Part]],
        noise: Callable[[int, int], Tensor],
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
        self._clipping: Clipping = mechanism.clipping
        self._clip, self._tensors = mechanism.clip if clip is None else clip, list(tensors)
        self._noisy = bool(mechanism.sigma) and mechanism.unit != "client"
        std = Noise.of(mechanism.sigma or 0.0 if self._noisy else 0.0, mechanism.clipping)
        share = math.sqrt(cohort_size) if mechanism.noise == "distributed" else 1.0
        self._noise_std = std.on_sum * self._clip / share * factors if self._noisy else 0.0
        self._count_std = std.on_number / share * factors
        self.noise_var = (self._noise_std / sizes) ** 2
        self.queries: Counter[int] = Counter()
        self.within = sizes.new_zeros(len(sizes), self._clipping == "adaptive")

    def __call__(self, theta: Tensor, *, draw: int = 0, minus: tuple[float, Tensor] | None = None) -> Tensor:
        """``[d]`` or ``[S, d]`` -> ``[S, d]``: clipped per record, summed, noised, divided by the expected size.

        ``minus=(c, other)`` releases the difference g(theta) - c g(other) of every record's gradients, clipped as one.
        """
        query = self.queries[draw]
        self.queries[draw] += 1
        d = theta.shape[-1]
        theta = theta.expand(len(self._sizes), d)
        points = [(1.0, theta)] if minus is None else [(1.0, theta), (-minus[0], minus[1].expand_as(theta))]
        total, count = self._sums(draw, points)
        if self._unit == "batch":
            total = self._sizes * clipped_tensors(total / self._sizes, self._clip, self._tensors)
        if self._noisy:
            normal = self._noise(draw, query)
            total, count = total + self._noise_std * normal[..., :d], count + self._count_std * normal[..., d:]
        self.within = self.within + count / self._sizes
        return total / self._sizes

    def _sums(self, draw: int, points: Points) -> tuple[Tensor, Tensor]:
        """Over the batch: the gradients; and, in the columns of ``within``, those within the threshold less half of all."""
        total = torch.zeros_like(points[0][1], memory_format=torch.contiguous_format)
        count = torch.zeros_like(self.within)
        for examples, mask, rows in self._batch(draw):
            here = points if rows is None else [(factor, point[rows]) for factor, point in points]
            if self._unit != "example" or math.isinf(self._clip):
                part = plain_sum(self._loss, here, examples, mask)
            else:
                tensors = self._tensors if self._clipping == "block" else None
                part, norms = clipped_sum(self._loss, here, examples, mask, self._clip, self._clipping, tensors)
                if self._clipping == "adaptive":
                    half = (_within(norms, self._clip) * mask).sum(-1, keepdim=True)
                    count = count + half if rows is None else count.index_add(0, rows, half)
            total = total + part if rows is None else total.index_add(0, rows, part)
        return total, count


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
        pieces = grads.split(tensors, dim=-1) if tensors else (grads,)
        bound, sums = clip / math.sqrt(len(pieces)), list[Tensor]()
        norms = [torch.linalg.vector_norm(piece, dim=-1) for piece in pieces]
        for piece, norm in zip(pieces, norms, strict=True):
            usable = norm.isfinite() & mask
            scale = torch.where(usable, shrinkage(norm, bound, clipping), 0)
            sums.append(torch.einsum("sb,sbd->sd", scale, piece.masked_fill_(~usable.unsqueeze(-1), 0)))
        return torch.cat(sums, dim=-1), torch.linalg.vector_norm(torch.stack(norms), dim=0)


def shrinkage(norms: Tensor, clip: float, clipping: Clipping) -> Tensor:
    """What a vector of this norm is multiplied with, so that its norm is ``clip`` at most."""
    return clip / (norms + STABLE) if clipping == "automatic" else (clip / norms).clamp(max=1)


def _within(norms: Tensor, clip: float) -> Tensor:
    """1/2 for a norm within the threshold, -1/2 for one beyond it, or that is not finite."""
    return (norms <= clip).to(norms.dtype) - 0.5


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


def plain_sum(loss: Loss, points: Points, examples: Records, mask: Tensor) -> Tensor:
    """``[S, d]``: the sum of the gradients without clipping, never materialised per record. Not private."""

    def total(theta: Tensor, examples: Records, mask: Tensor) -> Tensor:
        losses = vmap(loss, in_dims=(None, 0))(theta, examples)
        return torch.where(mask, losses, 0).sum()

    with torch.no_grad():
        sums = [factor * vmap(grad(total))(theta, examples, mask) for factor, theta in points]
        return torch.stack(sums).sum(0)


Fields = Mapping[str, Tensor]


def clipped_upload(fields: Fields, clip: float, clipping: Clipping) -> tuple[dict[str, Tensor], Tensor]:
    """The fields of S clients' uploads, each client's clipped as one vector; and for each 1/2 where it was within, else -1/2.

    An upload that is not finite counts as zero.
    """
    norms = torch.linalg.vector_norm(torch.cat(list(fields.values()), dim=-1), dim=-1, keepdim=True)
    usable = norms.isfinite()
    scale = torch.where(usable, shrinkage(norms, clip, clipping), 0)
    return {name: scale * field.where(usable, 0) for name, field in fields.items()}, _within(norms, clip)


def noised_upload(
    fields: Fields, mechanism: Mechanism, clip: float | None, cohort: int, random: torch.Generator
) -> dict[str, Tensor]:
    """The fields of a sum of clipped uploads over ``cohort``, its expected size, with the noise of a round.

    With a threshold ``clip`` of adaptive clipping, the last field is the number of those within it.
    """
    std, whole = Noise.of(calibrated_sigma(mechanism), mechanism.clipping), torch.cat(list(fields.values()))
    scale = torch.full_like(whole, std.on_sum * (mechanism.clip if clip is None else clip) / cohort)
    if clip is not None:
        scale[-1] = std.on_number / cohort
    noised = whole + scale * torch.randn(len(whole), generator=random, dtype=whole.dtype, device=whole.device)
    return dict(zip(fields, noised.split([len(field) for field in fields.values()]), strict=True))


def next_clip(clip: float, within: float, quantile: float) -> float:
    """The threshold of the next round: lower where more than the quantile of gradients were within this one's.

    >>> round(next_clip(1.0, 0.9, 0.5), 4), next_clip(1.0, 0.5, 0.5)
    (0.9231, 1.0)
    """
    return clip * math.exp(-CLIP_STEP * (min(max(within, 0.0), 1.0) - quantile))
