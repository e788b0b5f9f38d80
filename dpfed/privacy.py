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
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, vmap

from dpfed import flat
from dpfed.compiled import Inputs, Outputs, Run, anatomy, directly, narrow_products, number_of
from dpfed.fast import Products
from dpfed.flat import FlatModel, Records, widened
from dpfed.keyed import fold
from dpfed.mechanism import AsReleased as AsReleased
from dpfed.mechanism import Clipping, Unit, calibrated_sigma, count_weight, reach
from dpfed.mechanism import Gaussian as Gaussian
from dpfed.mechanism import Mechanism as Mechanism
from dpfed.mechanism import Plain as Plain
from dpfed.mechanism import events as events
from dpfed.mechanism import expected_size as expected_size
from dpfed.mechanism import protection as protection

ALL = slice(None)
BLOCK = 512  # squares that are added up in the dtype of the gradients; what is beyond in float64
NARROW = 2.0**-10  # relative error of a number that is cut to the 11 bits of a narrow product (`narrow_products`)
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
    ``factors`` are what sigma is multiplied by for each client.
    """

    def __init__(
        self,
        sums: Sums,
        batch: Callable[[int], list[Part]],
        noise: Callable[[Tensor, Tensor | float, int, int], Tensor],
        sizes: Tensor,
        mechanism: Mechanism,
        cohort_size: int = 1,
        *,
        clip: float | None = None,
        factors: Tensor | float = 1.0,
    ) -> None:
        self._sums, self._batch, self._noise, self._sizes = sums, batch, noise, sizes
        self._variants = mechanism.augmentations
        self._unit: Unit = mechanism.unit
        self._clipping: Clipping = "flat" if mechanism.unit == "client" else mechanism.clipping  # there, uploads are clipped
        self._clip = mechanism.clip if clip is None else clip
        self._noisy = bool(mechanism.sigma) and mechanism.unit != "client"
        self._noise_std: Tensor | float = 0.0
        if mechanism.sigma and self._noisy:
            share = math.sqrt(cohort_size) if mechanism.noise == "distributed" else 1.0
            self._noise_std = mechanism.sigma * reach(self._clipping, self._clip) / share * factors
        self.queries: Counter[int] = Counter()
        self.within = torch.zeros_like(sizes)

    @property
    def noise_var(self) -> Tensor:
        return (self._noise_std / self._sizes) ** 2

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
            sizes = tensors_within(self._sums.model.layout.sizes, only)
            total = self._sizes * clipped_tensors(total / self._sizes, self._clip, sizes)
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
        for examples, mask, rows in self._batch(draw):
            here = points if rows is None else [(factor, point[rows]) for factor, point in points]
            if self._unit != "example" or math.isinf(self._clip):
                part = self._sums.plain(here, examples, mask, only, self._variants)
            else:
                part, norms = self._sums.clipped(here, examples, mask, self._clip, self._clipping, only, self._variants)
                if self._clipping == "adaptive":
                    count = (_within(norms, self._clip) * mask).sum(-1, keepdim=True)
                    part = torch.cat([part, count_weight(self._clip) * count], dim=-1)
            total = total + part if rows is None else total.index_add(0, rows, part)
        return total


Points = Sequence[tuple[float, Tensor]]
"""Where gradients are taken, each with its public factor; the first factor is 1."""


class Use(NamedTuple):
    """One product of ``length`` rows of a record with a weight; ``shape`` is that of what comes out."""

    kind: str
    length: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Survey:
    """What one record's way through a model is made of, seen on one record without its numbers.

    ``uses``: the tensors whose whole gradient is a product of two factors that are smaller than itself, so that it is never
    made for single records. ``num_saved``: bytes that the forward pass of one record keeps for the backward pass.
    """

    uses: dict[str, tuple[Use, ...]] = field(default_factory=dict[str, tuple[Use, ...]])
    num_saved: int = 0


def survey(model: FlatModel, example: Records, dtype: torch.dtype | None = None, times_smaller: float | None = None) -> Survey:
    """Try one record. A tensor that is also used otherwise than in a product that is seen through is not among the uses.

    ``times_smaller``: how much the factors of several rows have to be smaller than their product. By default 4 on a CPU, where
    the arithmetic of their norms is dear, and 1 elsewhere, where memory is (benchmarks/NOTES.md).
    """
    theta = model.theta0()
    frozen, weights = model.frozen(dtype), model.layout.views(flat.in_dtype(theta, dtype).requires_grad_())
    own = {_place(x) for x in (*frozen.values(), *weights.values(), *example.values())}
    saved, shapes = dict[int, int](), list[tuple[int, ...]]()

    def pack(x: Tensor) -> Tensor:
        if _place(x) not in own:
            saved[_place(x)] = x.untyped_storage().nbytes()
        return x

    def probe(name: str, out: Tensor) -> Tensor:
        shapes.append(tuple(out.shape))
        return torch.zeros_like(out, requires_grad=True)

    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x), Products(weights, weights, probe) as products:
        loss = model.loss(weights | frozen, model.in_dtype(example, dtype))
    elsewhere = cast(tuple[Tensor | None, ...], torch.autograd.grad(loss, list(weights.values()), allow_unused=True))
    direct = {name for name, g in zip(weights, elsewhere, strict=True) if g is not None}
    uses: dict[str, tuple[Use, ...]] = {}
    for product, shape in zip(products.found, shapes, strict=True):
        uses[product.name] = (*uses.get(product.name, ()), Use(product.kind, product.rows.shape[0], shape))
    alike = {name: some for name, some in uses.items() if name not in direct and len({use.kind for use in some}) == 1}
    several = times_smaller or (4 if theta.device.type == "cpu" else 1)
    times = {name: 1 if sum(use.length for use in some) == 1 else several for name, some in alike.items()}
    less = [name for name in alike if times[name] * num_in_factors(alike[name], weights[name].shape) < weights[name].numel()]
    return Survey({name: alike[name] for name in less}, sum(saved.values()))


def _place(x: Tensor) -> int:
    """Of its memory, of which there may be none behind it (on the device ``meta``)."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def num_in_factors(uses: Sequence[Use], shape: Sequence[int]) -> int:
    """Numbers in the two factors of a record's gradient: for every row what goes in (of a table, which one) and comes out."""
    inside, outside = (1, shape[1]) if uses[0].kind == "table" else (math.prod(shape[1:]), shape[0])
    return sum(use.length for use in uses) * (inside + outside)


class Asked(NamedTuple):
    """Which sum: of so many points and variants, of the coordinates from ``start`` to ``stop``, how clipped."""

    num_points: int
    num_variants: int
    start: int
    stop: int
    clipping: Clipping = "flat"


@dataclass(frozen=True)
class Sums:
    """Takes sums of a model's gradients over batches: by ``run``, eagerly or compiled, and in ``dtype``, if one is given.

    Then forward and backward pass have that precision; norms and sums have that of theta. What the ``survey`` found is taken by
    its factors. ``held`` are the frozen tensors in ``dtype``; where there are none, the module's own serve.
    """

    model: FlatModel
    survey: Survey = field(default_factory=Survey)
    dtype: torch.dtype | None = None
    held: Records = field(default_factory=Records)
    run: Run = directly

    @cached_property
    def _identity(self) -> int:
        model = self.model
        parts = model.layout.parts, tuple(self.survey.uses.items())
        module, tensors = model.module, (*model.module.parameters(), *model.module.buffers())
        given = [x for x in tensors if self.held or x.requires_grad]
        return number_of((anatomy((module, model.criterion, model.augment), given), parts, self.dtype))

    @cached_property
    def _frozen(self) -> Records:
        return {f"frozen.{name}": x for name, x in self.held.items()}

    def clipped(
        self,
        points: Points,
        examples: Records,
        mask: Tensor,
        clip: float,
        clipping: Clipping = "flat",
        only: slice = ALL,
        num_variants: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """``[S, d]``: of every client the sum over its batch of the records' gradients, each clipped; and the norms ``[S, B]``.

        A gradient that is not finite counts as zero: it moves the sum by nothing, so the sensitivity holds for it too.
        """
        found = self._run(partial(_clipped, self), points, examples, mask, only, num_variants, clipping, {"clip": clip})
        return found[0], found[1]

    def plain(self, points: Points, examples: Records, mask: Tensor, only: slice = ALL, num_variants: int = 1) -> Tensor:
        """``[S, d]``: the sum of the gradients without clipping, never materialised per record. Not private."""
        return self._run(partial(_plain, self), points, examples, mask, only, num_variants, "flat", {})[0]

    def _run(
        self,
        function: Callable[[Asked, Inputs], Outputs],
        points: Points,
        examples: Records,
        mask: Tensor,
        only: slice,
        num_variants: int,
        clipping: Clipping,
        further: dict[str, float],
    ) -> Outputs:
        start, stop, _ = only.indices(self.model.num_parameters)
        asked = Asked(len(points), num_variants, start, stop, clipping)
        inputs: dict[str, Tensor | float] = {"mask": mask, **further}
        for number, (factor, theta) in enumerate(points):
            inputs |= {f"theta.{number}": theta, f"factor.{number}": factor}
        inputs |= {f"example.{name}": column for name, column in examples.items()}
        key = self._identity, cast(Any, function).func.__name__, asked
        with narrow_products(self.dtype is not None and len(points) == 1):  # a difference of gradients is not of bfloat16
            return self.run(key, partial(function, asked), self._frozen, inputs)


def _part_of(inputs: Inputs, kind: str) -> dict[str, Any]:
    return {name.removeprefix(f"{kind}."): value for name, value in inputs.items() if name.startswith(f"{kind}.")}


def _weights(sums: Sums, theta: Tensor) -> Records:
    layout, theta = sums.model.layout, flat.in_dtype(theta, sums.dtype)
    return layout.views(theta) if theta.device.type == "cpu" else layout.aligned(theta)


def _plain(sums: Sums, asked: Asked, inputs: Inputs) -> Outputs:
    frozen, mask = _part_of(inputs, "frozen"), cast(Tensor, inputs["mask"])
    loss, examples = _varied(sums.model.loss, asked.num_variants), sums.model.in_dtype(_part_of(inputs, "example"), sums.dtype)

    def total(weights: Records, examples: Records, mask: Tensor) -> Tensor:
        def of_record(example: Records) -> Tensor:
            with Products(weights, (), _no_probe, by_patches=mask.device.type != "cpu"):
                return loss(weights | frozen, example)

        return torch.where(mask, vmap(of_record)(examples), 0).sum()

    with torch.no_grad():
        whole: list[Tensor] = []
        for number in range(asked.num_points):
            theta, factor = cast(Tensor, inputs[f"theta.{number}"]), inputs[f"factor.{number}"]
            weights = _weights(sums, theta)
            grads = cast(Records, vmap(grad(total))(weights, examples, mask))
            found = torch.cat([grads[part.name].flatten(1).to(theta.dtype) for part in sums.model.layout.parts], dim=-1)
            whole.append(factor * found[:, asked.start : asked.stop])
        return (torch.where(mask.any(-1, keepdim=True), torch.stack(whole).sum(0), 0),)


def _clipped(sums: Sums, asked: Asked, inputs: Inputs) -> Outputs:
    clip, mask = inputs["clip"], cast(Tensor, inputs["mask"])
    with torch.no_grad():
        points = [_of_records(sums, asked, inputs, number) for number in range(asked.num_points)]
        factors = [inputs[f"factor.{number}"] for number in range(asked.num_points)]
        pieces = [_difference(factors, [grads[name] for grads in points]) for name in points[0]]
        norms = [piece.norms() for piece in pieces]
        whole = torch.stack(norms).square().sum(0).sqrt()
        bounds = [(norm, clip / math.sqrt(len(pieces))) for norm in norms] if asked.clipping == "block" else [(whole, clip)]
        usable = [norm.isfinite() & mask for norm, _ in bounds]
        kept = zip(usable, bounds, strict=True)
        scales = [(torch.where(where, shrinkage(*bound, asked.clipping), 0), where) for where, bound in kept]
        each = zip(pieces, scales * (len(pieces) // len(scales)), strict=True)
        return torch.cat([piece.total(*scale) for piece, scale in each], dim=-1), whole


class _Gradient(NamedTuple):
    """The gradient of some coordinates, of every record: ``[S, B, n]``."""

    g: Tensor

    def norms(self) -> Tensor:
        return lengths(widened(self.g))

    def total(self, scale: Tensor, usable: Tensor) -> Tensor:
        """The sum of the records' gradients, each times its scale; without those that are not usable, whatever they are."""
        g = widened(self.g).masked_fill(~usable.unsqueeze(-1), 0)
        return torch.einsum("sb,sbd->sd", scale, g) if g.device.type == "cpu" else (g * scale.unsqueeze(-1)).sum(1)


class _Factors(NamedTuple):
    """The gradient of one tensor, of every record, as the product  g' x  of ``g`` [S, B, L, out] and ``x`` [S, B, L, in].

    Of a table, ``x`` [S, B, L] says which of its rows. Neither the product nor anything of its size is made for single records:
        |g' x|^2 = sum(x x' * g g')                   Goodfellow 2015, arXiv 1510.01799; Li et al. 2021, arXiv 2110.05679
        sum_b scale_b g_b' x_b, a product of matrices with a row for every row of every record       Bu et al. 2022, 2210.00038
    """

    kind: str
    shape: tuple[int, ...]
    x: Tensor
    g: Tensor

    def norms(self) -> Tensor:
        """Never below the true norm. With several rows the sum of products may cancel, and its rounding error is then large
        beside it: so that error's size is added, sqrt(in + out) eps (sum_l |x_l| |g_l|)^2. In bfloat16, so is what `total` may
        lose by rounding scale times g."""
        x, g = self._wide()
        least, table = math.sqrt(torch.finfo(g.dtype).tiny), self.kind == "table"
        each = lengths(g).clamp(min=least)
        if not table:
            each = each * lengths(x).clamp(min=least)
        slack = NARROW * each.sum(-1) if self.g.dtype == torch.bfloat16 else 0
        if x.shape[2] == 1:
            return each.squeeze(-1) + slack
        alike = x.unsqueeze(-1) == x.unsqueeze(-2) if table else x @ x.transpose(-1, -2)
        found = (alike * (g @ g.transpose(-1, -2))).sum((-1, -2)).clamp(min=0)
        width = g.shape[-1] + (0 if table else x.shape[-1])
        return (found + math.sqrt(width) * torch.finfo(g.dtype).eps * each.sum(-1).square()).sqrt() + slack

    def total(self, scale: Tensor, usable: Tensor) -> Tensor:
        x, g = self._wide()
        usable = usable[..., None, None]
        g = torch.where(usable, g * scale[..., None, None], 0).flatten(1, 2)
        if self.kind == "table":
            num_clients, (num_rows, width) = len(x), self.shape
            first = num_rows * torch.arange(num_clients, device=x.device).unsqueeze(-1)
            rows = (x.flatten(1).clamp(min=0) + first).flatten()
            found = torch.ops.aten.embedding_dense_backward(g.flatten(0, 1), rows, num_clients * num_rows, -1, False)
            return found.view(num_clients, num_rows * width)
        found = g.transpose(1, 2) @ torch.where(usable, x, 0).flatten(1, 2)
        if self.kind == "convolution":
            found = found.unflatten(-1, (*self.shape[2:], self.shape[1])).movedim(-1, 2)
        return found.flatten(1)

    def _wide(self) -> tuple[Tensor, Tensor]:
        """A row of a table that has no gradient stands there as -1."""
        g = widened(self.g)
        return (self.x, torch.where(self.x.unsqueeze(-1) < 0, 0, g)) if self.kind == "table" else (widened(self.x), g)


def _difference(factors: Sequence[Tensor | float], pieces: Sequence[_Gradient | _Factors]) -> _Gradient | _Factors:
    """The sum of the same piece at several points, each times its factor."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    scaled = [factor * widened(piece.g) for factor, piece in zip(factors, pieces, strict=True)]
    if isinstance(first, _Gradient):
        return _Gradient(torch.stack(scaled).sum(0))
    x = torch.cat([cast(_Factors, piece).x for piece in pieces], dim=2)
    return first._replace(x=x, g=torch.cat(scaled, dim=2))


def _of_records(sums: Sums, asked: Asked, inputs: Inputs, number: int) -> dict[str, _Gradient | _Factors]:
    """The gradient of every record at one point: of the tensors that lie in what is asked for, or of a part of one."""
    layout, theta = sums.model.layout, cast(Tensor, inputs[f"theta.{number}"])
    within = {part.name: some for part, some in zip(layout.parts, ranges(layout.sizes, asked.start, asked.stop), strict=True)}
    whole = {part.name for part in layout.parts if within[part.name] == (0, part.size)}
    large = {name: uses for name, uses in sums.survey.uses.items() if name in whole and asked.num_variants == 1}
    frozen, weights = _part_of(inputs, "frozen"), _weights(sums, theta)
    examples = sums.model.in_dtype(_part_of(inputs, "example"), sums.dtype)
    loss = _varied(sums.model.loss, asked.num_variants)
    closed = {name: weight for name, weight in weights.items() if name in large}
    probes = {name: [closed[name].new_zeros(use.shape) for use in uses] for name, uses in large.items()}

    by_patches = theta.device.type != "cpu"  # there, plain convolutions are faster

    def of_record(small: Records, probes: dict[str, list[Tensor]], closed: Records, example: Records) -> tuple[Tensor, Any]:
        left, rows = {name: iter(some) for name, some in probes.items()}, defaultdict[str, list[Tensor]](list)
        with Products(small | closed, closed, lambda name, out: next(left[name]), by_patches) as products:
            value = loss(small | closed | frozen, example)
        for product in products.found:
            rows[product.name].append(product.rows)
        return value, dict(rows)

    small = {name: weight for name, weight in weights.items() if name not in large}
    per_record = vmap(grad(of_record, argnums=(0, 1), has_aux=True), in_dims=(None, None, None, 0))
    (grads, outside), inside = vmap(per_record, in_dims=(0, None, 0, 0))(small, probes, closed, examples)
    found: dict[str, _Gradient | _Factors] = {}
    for part in layout.parts:
        start, stop = within[part.name]
        if part.name in large:
            g = torch.cat([some.reshape(*some.shape[:2], -1, some.shape[-1]) for some in outside[part.name]], dim=2)
            kind = large[part.name][0].kind
            found[part.name] = _Factors(kind, part.shape, torch.cat(inside[part.name], dim=2), g)
        elif start < stop:
            found[part.name] = _Gradient(grads[part.name].reshape(*examples["y"].shape[:2], -1)[..., start:stop])
    return found


def lengths(x: Tensor) -> Tensor:
    """The L2 norms over the last axis. In float32 a sum over millions of squares would be off by half a percent, and the clip
    with it; block by block it is right to 2^-16."""
    parts = x
    if num_blocks := x.shape[-1] // BLOCK:
        whole = x[..., : num_blocks * BLOCK].unflatten(-1, (num_blocks, BLOCK))
        parts = torch.cat([torch.linalg.vector_norm(whole, dim=-1), x[..., num_blocks * BLOCK :]], dim=-1)
    return parts.double().square().sum(-1).sqrt().to(x.dtype)  # torch 2.11 traces vector_norm of an axis of length 1 wrongly


def shrinkage(norms: Tensor, clip: Tensor | float, clipping: Clipping) -> Tensor:
    """What a vector of this norm is multiplied with, so that its norm is ``clip`` at most.

    A quotient of a number and of a tensor with that number would round differently, and a trace has tensors.
    """
    return clip * (norms + STABLE).reciprocal() if clipping == "automatic" else (clip * norms.reciprocal()).clamp(max=1)


def _within(norms: Tensor, clip: float) -> Tensor:
    """1/2 for a norm within the threshold, -1/2 for one beyond it, or that is not finite."""
    return (norms <= clip).to(norms.dtype) - 0.5


def ranges(tensors: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """Of each tensor the part that lies inside a range of all coordinates.

    >>> ranges([2, 3, 4], 2, 6)
    [(2, 2), (0, 3), (0, 1)]
    """
    ends = list(pairwise(accumulate(tensors, initial=0)))
    return [(min(max(start, low), high) - low, min(max(stop, low), high) - low) for low, high in ends]


def tensors_within(tensors: Sequence[int], only: slice) -> list[int]:
    """The sizes of the tensors, as far as they lie inside a range of coordinates.

    >>> tensors_within([2, 3, 4], slice(2, 6))
    [3, 1]
    """
    start, stop, _ = only.indices(sum(tensors))
    return [high - low for low, high in ranges(tensors, start, stop) if high > low]


def clipped_tensors(x: Tensor, clip: float, tensors: list[int]) -> Tensor:
    """Every tensor inside ``x`` clipped by itself to the whole of ``clip``, as the released code does it."""
    pieces = x.split(tensors, dim=-1)
    norms = [torch.linalg.vector_norm(piece, dim=-1, keepdim=True) for piece in pieces]
    return torch.cat([piece * shrinkage(norm, clip, "flat") for piece, norm in zip(pieces, norms, strict=True)], dim=-1)


def _varied(loss: Callable[[Records, Records], Tensor], num: int) -> Callable[[Records, Records], Tensor]:
    """The mean loss over ``num`` variants of a record, so that its gradient is the mean of theirs before it is clipped."""
    if num == 1:
        return loss

    def mean_loss(weights: Records, example: Records) -> Tensor:
        keys = fold(example["key"], torch.arange(num, device=example["key"].device))

        def variant(key: Tensor) -> Tensor:
            return loss(weights, example | {"key": key})

        return vmap(variant)(keys).mean()

    return mean_loss


def _no_probe(name: str, out: Tensor) -> Tensor:
    raise RuntimeError(f"{name}: a plain sum takes no gradient by its factors")


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
