"""The only file that sees raw gradients.

A gradient leaves this file clipped per record, summed, noised and divided by the *expected* batch size, or not at all. What
the algorithms get is ``grad(theta)``; every call is counted, and the count becomes the receipt.

Formal guarantee. Let the batch hold every record of a client independently with probability q (``sampling="poisson"``). Then
one call releases  sum_j clip_C(grad l_j) + N(0, (sigma C)^2 I),  whose L2 sensitivity to adding or removing one record is C: a
Poisson-subsampled Gaussian mechanism of multiplier sigma. With ``sampling="fixed"`` neighbours replace one record, the
sensitivity is 2C, and the ledger charges sigma / 2. Two calls on the same batch are one Gaussian of multiplier
sigma / sqrt(2) inside the same subsampling, and are charged as such.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpfed.data import RECORD, Footprint, Sampling
from dpfed.errors import InputError
from dpfed.flat import Records
from dpfed.ledger import Event

Loss = Callable[[Tensor, Records], Tensor]


class Mechanism(Protocol):
    """What is done to the gradients of a batch. Values: all public, none depends on data."""

    @property
    def batch_size(self) -> int: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def clip(self) -> float: ...
    @property
    def sigma(self) -> float | None: ...
    @property
    def noise(self) -> Literal["local", "distributed"]: ...
    @property
    def colluding(self) -> float: ...


@dataclass(frozen=True)
class Gaussian:
    """Clip every record's gradient to L2 norm ``clip``, add noise of standard deviation ``sigma * clip`` to the sum.

    Args:
        epsilon: what the whole run may cost; sigma is then calibrated for the client that spends most.
        sigma: the noise multiplier itself; give this or epsilon (--mechanism.epsilon None --mechanism.sigma 1).
        clip: the norm to which every record's gradient is clipped (C).
        batch_size: the expected size of a batch (B); a client with fewer records uses all of them, at rate 1.
        sampling: poisson (neighbours add or remove a record) or fixed (neighbours replace one; costs much more).
        noise: local: every upload is private by itself. distributed: every client adds only its share of the noise, and only
            the sum of a cohort is; needs secure aggregation, one local step, and an upload that is linear in the gradient.
        colluding: the part of a cohort that may tell its noise to the observer (distributed noise only).
    """

    epsilon: float | None = None
    sigma: float | None = None
    clip: float = 1.0
    batch_size: int = 64
    sampling: Sampling = "poisson"
    noise: Literal["local", "distributed"] = "local"
    colluding: float = 0.0

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.sigma is None):
            raise InputError("mechanism: give either epsilon (sigma is then calibrated) or sigma, not both and not neither.")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise InputError(f"mechanism.epsilon: must be a finite number above 0, got {self.epsilon}.")
        if self.sigma is not None and not 0 <= self.sigma < math.inf:
            raise InputError(f"mechanism.sigma: must be a finite number, 0 or above, got {self.sigma}.")
        if not self.clip > 0 or (math.isinf(self.clip) and self.sigma != 0):
            raise InputError(
                f"mechanism.clip: must be above 0, and finite where there is noise, got {self.clip}. "
                "Without a bound on every record's gradient no noise protects it; 1.0 is a good start."
            )
        if not 0 <= self.colluding < 1 or (self.colluding and self.noise == "local"):
            raise InputError(
                f"mechanism.colluding: must be at least 0 and below 1, got {self.colluding}, and 0 where noise is local: "
                "no client relies on another's noise there."
            )
        _check_batch(self.batch_size, self.sampling)


@dataclass(frozen=True)
class Plain:
    """No clipping and no noise: the mean gradient of the batch. The ledger says epsilon = inf.

    Args:
        batch_size: records in a batch (B).
        sampling: fixed: exactly B of them; poisson: B on average.
    """

    batch_size: int = 64
    sampling: Sampling = "fixed"

    def __post_init__(self) -> None:
        _check_batch(self.batch_size, self.sampling)

    @property
    def clip(self) -> float:
        return math.inf

    @property
    def sigma(self) -> float:
        return 0.0

    @property
    def noise(self) -> Literal["local"]:
        return "local"

    @property
    def colluding(self) -> float:
        return 0.0


def _check_batch(batch_size: int, sampling: str) -> None:
    if batch_size < 1:
        raise InputError(f"mechanism.batch_size: must be at least 1, got {batch_size}.")
    if sampling not in ("poisson", "fixed"):
        raise InputError(f"mechanism.sampling: must be 'poisson' or 'fixed', got {sampling!r}.")


def expected_size(mechanism: Mechanism, num_examples: int) -> int:
    """The public divisor: the expected batch size of a client, never the realised one."""
    return min(mechanism.batch_size, num_examples)


def protection(mechanism: Mechanism, cohort: Sequence[tuple[float, int]]) -> list[float]:
    """What stands between the observer and a record of each client of a cohort, as a multiple of sigma.

    ``cohort``: every client's weight in the mean and its expected batch size. Local noise protects each client with all of
    sigma. With distributed noise client j contributes  w_j / B_j (sum of clipped + sigma C / sqrt(S) N(0, I)),  so the sum has
    the noise of all, and a record of client i moves it by  w_i / B_i C.  Those who collude are taken to be the noisiest others.

    >>> protection(Gaussian(sigma=1.0, noise="distributed"), [(0.25, 8)] * 4)
    [1.0, 1.0, 1.0, 1.0]
    >>> protection(Gaussian(sigma=1.0, noise="distributed", colluding=0.5), [(0.25, 8)] * 2)
    [0.7071067811865476, 0.7071067811865476]
    """
    if mechanism.noise == "local":
        return [1.0] * len(cohort)
    parts, num_colluding = [weight / size for weight, size in cohort], math.floor(mechanism.colluding * len(cohort))
    found: list[float] = []
    for i, own in enumerate(parts):
        others = sorted(parts[:i] + parts[i + 1 :])
        honest = [own, *others[: len(others) - num_colluding]]
        found.append(math.sqrt(sum(part**2 for part in honest) / len(parts)) / own)
    return found


def events(
    mechanism: Mechanism,
    num_examples: int,
    queries: Mapping[int, int],
    factor: float = 1.0,
    footprint: Footprint = RECORD,
) -> Counter[Event]:
    """What one local step costs a client: one event a batch, at sigma / sqrt(number of gradients taken on that batch).

    ``factor`` is the client's ``protection``, ``footprint`` the federation's.
    """
    if mechanism.sigma is None:
        raise InputError("mechanism.sigma: not calibrated yet; dpfed.run and dpfed.calibrated do it.")
    sigma, size, sampling = factor * mechanism.sigma, mechanism.batch_size, mechanism.sampling
    seen = "open" if mechanism.noise == "local" else "secure"
    owned, readers = footprint
    return Counter(
        Event(sampling, size, num_examples, sigma / math.sqrt(count), seen, owned=owned, readers=readers)
        for count in queries.values()
    )


class Part(NamedTuple):
    """Some columns of a batch: of all clients, or (overflow of a Poisson batch) of those clients in ``rows`` only."""

    examples: Records
    mask: Tensor
    rows: Tensor | None = None


class PrivateGradient:
    """The gradient of one local step of S clients, as a function of ``theta``: the algorithms' only view of the data.

    ``noise_var`` is the public variance (sigma C / B)^2 of every coordinate, one row a client. ``grad(theta, draw=1)`` asks
    for a further, independent batch of the same step. ``queries`` counts the calls by draw; what was counted is charged.
    """

    def __init__(
        self,
        loss: Loss,
        batch: Callable[[int], list[Part]],
        noise: Callable[[int, int], Tensor],
        sizes: Tensor,
        mechanism: Mechanism,
        cohort_size: int = 1,
    ) -> None:
        self._loss, self._batch, self._noise, self._sizes, self._clip = loss, batch, noise, sizes, mechanism.clip
        self._noise_std = mechanism.sigma * mechanism.clip if mechanism.sigma else 0.0
        if mechanism.noise == "distributed":
            self._noise_std /= math.sqrt(cohort_size)
        self.noise_var = (self._noise_std / sizes) ** 2
        self.queries: Counter[int] = Counter()

    def __call__(self, theta: Tensor, *, draw: int = 0, minus: tuple[float, Tensor] | None = None) -> Tensor:
        """``[d]`` or ``[S, d]`` -> ``[S, d]``: clipped per record, summed, noised, divided by the expected size.

        ``minus=(c, other)`` releases the difference g(theta) - c g(other) of every record's gradients, clipped as one.
        """
        query = self.queries[draw]
        self.queries[draw] += 1
        theta = theta.expand(len(self._sizes), theta.shape[-1])
        total = torch.zeros_like(theta, memory_format=torch.contiguous_format)
        points = [(1.0, theta)] if minus is None else [(1.0, theta), (-minus[0], minus[1].expand_as(theta))]
        for examples, mask, rows in self._batch(draw):
            here = points if rows is None else [(factor, point[rows]) for factor, point in points]
            if math.isinf(self._clip):
                part = plain_sum(self._loss, here, examples, mask)
            else:
                part = clipped_sum(self._loss, here, examples, mask, self._clip)
            total = total + part if rows is None else total.index_add(0, rows, part)
        if self._noise_std:
            total = total + self._noise_std * self._noise(draw, query)
        return total / self._sizes


Points = Sequence[tuple[float, Tensor]]
"""Where gradients are taken, each with its public factor."""


def clipped_sum(loss: Loss, points: Points, examples: Records, mask: Tensor, clip: float) -> Tensor:
    """``[S, d]``: for every client the sum over its batch of the records' gradients, each clipped to norm ``clip``.

    A gradient that is not finite counts as zero: it moves the sum by nothing, so the sensitivity holds for it too.
    """
    with torch.no_grad():
        per_record = vmap(vmap(grad(loss), in_dims=(None, 0)))
        (_, theta), *others = points  # the first factor is 1
        grads = cast(Tensor, per_record(theta, examples))
        for factor, other in others:
            grads = grads + factor * cast(Tensor, per_record(other, examples))
        norms = torch.linalg.vector_norm(grads, dim=-1)
        usable = norms.isfinite() & mask
        scale = torch.where(usable, (clip / norms).clamp(max=1), 0)
        return torch.einsum("sb,sbd->sd", scale, grads.masked_fill_(~usable.unsqueeze(-1), 0))


def plain_sum(loss: Loss, points: Points, examples: Records, mask: Tensor) -> Tensor:
    """``[S, d]``: the sum of the gradients without clipping, never materialised per record. Not private."""

    def total(theta: Tensor, examples: Records, mask: Tensor) -> Tensor:
        losses = vmap(loss, in_dims=(None, 0))(theta, examples)
        return torch.where(mask, losses, 0).sum()

    with torch.no_grad():
        sums = [factor * vmap(grad(total))(theta, examples, mask) for factor, theta in points]
        return torch.stack(sums).sum(0)
