"""Pure functions on vectors, the words in which the algorithms are written. All work on the last axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, wraps
from itertools import accumulate
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from dpfed.errors import InputError
from dpfed.flat import sent

Schedule = Literal["cosine", "constant", "linear"]
Number = TypeVar("Number", Tensor, float)
Given = ParamSpec("Given")
Made = TypeVar("Made")


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

    @property
    def mean(self) -> Tensor:
        """The average without the bias of its beginning at zero: m_hat and v_hat in the papers."""
        return self.value / self.weight


def no_moment(like: Tensor) -> Moment:
    """Nothing averaged yet."""
    return Moment(torch.zeros_like(like), like.new_zeros(1))


class Adaptive(NamedTuple):
    """The state of Adam: parameters and both moments of their gradient."""

    theta: Tensor
    m: Moment
    v: Moment


class Corrected(NamedTuple):
    """The same, and the noise that is averaged into ``v``."""

    theta: Tensor
    m: Moment
    v: Moment
    phi: Moment


def push(moment: Moment, new: Tensor, beta: float) -> Moment:
    """One step of the moving average, of the value and of its weight."""
    return Moment(ema(moment.value, new, beta), beta * moment.weight + (1 - beta))


def ema(old: Number, new: Number, beta: float) -> Number:
    return beta * old + (1 - beta) * new


def debiased(second: Tensor, noise_var: Tensor, *, floor_abs: float, floor_rel: float = 0.0) -> Tensor:
    """The second moment of the signal alone: E[g^2] = signal + noise_var, never below a floor.

    Without noise the floor falls to ``floor_abs``, and this is the plain second moment.
    """
    return torch.maximum(second - noise_var, (floor_rel * noise_var).clamp(min=floor_abs))


def mean_direction(delta: Tensor, lr: float, num_steps: int, otherwise: Tensor) -> Tensor:
    """The mean direction of ``num_steps`` steps of size ``lr`` that moved by ``delta``; ``otherwise`` where none has a length.

    >>> mean_direction(torch.tensor([-0.6, 0.0]), 0.1, 3, otherwise=torch.zeros(2))
    tensor([2., -0.])
    """
    return -delta / (num_steps * lr) if lr else otherwise


def laplacian_smooth(x: Tensor, sigma: float) -> Tensor:
    """``(I - sigma L)^-1 x`` with L the Laplacian of a ring: keeps the mean, damps what changes from neighbour to neighbour.

    >>> laplacian_smooth(torch.tensor([1.0, 0, 0, 0, 0]).double(), sigma=1.0).numpy().round(6).tolist()
    [0.454545, 0.181818, 0.090909, 0.090909, 0.181818]

    Fewer than three numbers have no neighbours on two sides, and stay as they are.
    """
    n = x.shape[-1]
    if n < 3:
        return x
    frequencies = 2 * math.pi / n * torch.arange(n // 2 + 1, device=x.device, dtype=x.dtype)
    return torch.fft.irfft(torch.fft.rfft(x) / (1 + 2 * sigma * (1 - frequencies.cos())), n=n)


def smooth_tensors(x: Tensor, sizes: Sequence[int], sigma: float) -> Tensor:
    """Every tensor inside ``x`` is a ring of its own."""
    return torch.cat([laplacian_smooth(tensor, sigma) for tensor in x.split(sizes, dim=-1)], dim=-1)


def decayed(theta: Tensor, lr: float, weight_decay: float) -> Tensor:
    """Decoupled weight decay: the parameters shrink. (The papers print the sign that makes them grow.)"""
    return (1 - lr * weight_decay) * theta


class Quantised(NamedTuple):
    """A vector in half a byte a coordinate: two codes of 4 bits to a byte, and the least and greatest value of each block.

    >>> x = torch.tensor([-0.8, -0.35, -0.1, 0.0, 0.05, 0.2, 0.6, 0.7], dtype=torch.float64)
    >>> packed = quantise(x, sizes=[8], block=8)
    >>> [f"{byte:02x}" for byte in packed.codes.tolist()]
    ['05', '78', '9a', 'ef']
    >>> [round(value, 12) for value in dequantise(packed, [8], 8, x.dtype).tolist()]
    [-0.8, -0.3, -0.1, 0.0, 0.1, 0.2, 0.6, 0.7]
    """

    codes: Tensor
    low: Tensor
    high: Tensor


def quantise(x: Tensor, sizes: Sequence[int], block: int) -> Quantised:
    """``[d]`` to 16 evenly spaced values a block. Blocks begin anew with every tensor; a constant block has codes 0.

    The last block of a tensor is filled up with its last entry, which changes neither its least nor its greatest value.
    """
    stretches = _stretches(tuple(sizes), block)
    parts = zip(x.split([length for length, _ in stretches]), stretches, strict=True)
    pieces = [piece for part, (_, missing) in parts for piece in (part, part[-1:].expand(missing))]
    return Quantised(*_encoded(torch.cat(pieces).view(-1, block)))


def no_error(like: Tensor, sizes: Sequence[int], block: int) -> Quantised:
    """Zeros, quantised."""
    num_blocks = sum(math.ceil(size / block) for size in sizes)
    ends = like.new_zeros(num_blocks, dtype=small_dtype(like.dtype))
    return Quantised(like.new_zeros(num_blocks * block // 2, dtype=torch.uint8), ends, ends.clone())


def dequantise(packed: Quantised | Tensor, sizes: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    """The vector that the codes stand for; one that was never quantised stands for itself."""
    if isinstance(packed, Tensor):
        return packed
    stretches, blocks = _stretches(tuple(sizes), block), _decoded(packed.codes.view(-1, block // 2), *packed[1:], dtype)
    pieces = blocks.view(-1).split([length + missing for length, missing in stretches])
    return torch.cat([piece[:length] for piece, (length, _) in zip(pieces, stretches, strict=True)])


@cache
def _stretches(sizes: tuple[int, ...], block: int) -> list[tuple[int, int]]:
    """Neighbouring tensors up to one whose last block is not full: how long they are together, and what is missing."""
    found = [(0, 0)]
    for size in sizes:
        length, missing = found[-1]
        if missing:
            found.append((size, -size % block))
        else:
            found[-1] = (length + size, -size % block)
    return found


def has_kernels(ef_bits: int | None, block: int, tensors: Sequence[Tensor]) -> bool:
    """Whether `dpfed.kernels` takes a step of MicroAdam for these tensors."""
    fits = ef_bits is not None and 16 <= block <= 4096 and block & (block - 1) == 0 and torch.version.cuda is not None
    return fits and all(x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() for x in tensors) and has_triton()


def fused(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """On a GPU the whole function is one pass over the memory, compiled when it is first called; elsewhere it is itself."""
    compiled = cache(lambda: torch.compile(function, dynamic=True))

    @wraps(function)
    def either(*given: Given.args, **named: Given.kwargs) -> Made:
        on_gpu = isinstance(given[0], Tensor) and given[0].is_cuda and has_triton()
        return (compiled() if on_gpu else function)(*given, **named)

    return either


@fused
def _encoded(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = (end.to(small_dtype(blocks.dtype)) for end in blocks.aminmax(dim=-1))
    start, unit = _grid(low, high, blocks.dtype)
    codes = ((blocks - start) / unit.masked_fill(unit == 0, math.inf) + 0.5).floor().clamp(0, 15).to(torch.uint8)
    first, second = codes.view(-1, 2).unbind(-1)
    return first << 4 | second, low, high


@fused
def _decoded(codes: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    start, unit = _grid(low, high, dtype)
    return torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1) * unit + start


def _grid(low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where the 16 values of each block start, and how far apart they are."""
    start = low.to(dtype).unsqueeze(-1)
    return start, (high.to(dtype).unsqueeze(-1) - start) / 15


def small_dtype(dtype: torch.dtype) -> torch.dtype:
    """How a frugal memory keeps its numbers: in bfloat16, or in float64 where the parameters are float64."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


class Ring(NamedTuple):
    """The last few sparse vectors, one after the other: where their entries stand, and what they are."""

    places: Tensor
    values: Tensor


def num_kept(size: int, density: float) -> int:
    """How many entries of a tensor make up its top ``density``."""
    return math.ceil(density * size)


def empty_ring(like: Tensor, sizes: Sequence[int], density: float, window: int) -> Ring:
    """Zeros, which add nothing wherever they stand."""
    if sum(sizes) >= 2**31:
        raise InputError(
            f"algorithm: places in a vector take four bytes, enough for {2**31 - 1:,} coordinates, not for {sum(sizes):,}. "
            "Train fewer of them (LoRA), or, with the optimizer, in several groups of parameters."
        )
    zeros = like.new_zeros(window * sum(num_kept(size, density) for size in sizes))
    return Ring(zeros.int(), zeros.to(small_dtype(like.dtype)))


def move_top(x: Tensor, ring: Ring, slot: int, window: int, sizes: Sequence[int], density: float) -> tuple[Tensor, Ring]:
    """Moves the largest magnitudes of every tensor in ``x`` into a slot of the ring; zeros stay where they stood.

    In a slot the places of a tensor ascend.
    """
    where = _top(x, sizes, density)
    places = ring.places.view(window, -1).select_scatter(where.int(), 0, slot)
    values = ring.values.view(window, -1).select_scatter(x[where].to(ring.values.dtype), 0, slot)
    return x.index_fill(0, where, 0), Ring(places.flatten(), values.flatten())


def _top(x: Tensor, sizes: Sequence[int], density: float) -> Tensor:
    """Where they stand, tensor after tensor. Tensors of one size are searched together: a GPU waits for nothing but starts."""
    tensors, starts = x.split(sizes), list(accumulate([0, *sizes[:-1]]))
    top = [x] * len(tensors)
    for size in dict.fromkeys(sizes):
        alike = [number for number, other in enumerate(sizes) if other == size]
        found = torch.stack([tensors[number] for number in alike]).abs().topk(num_kept(size, density), sorted=False).indices
        found = found.sort().values + constant(tuple(starts[number] for number in alike), x.device).unsqueeze(1)
        for number, places in zip(alike, found.unbind(), strict=True):
            top[number] = places
    return torch.cat(top)


@lru_cache(maxsize=1024)
def constant(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers that stay, brought to a device once, and nobody waits until they are there."""
    return sent(torch.tensor(numbers, dtype=dtype), device)


def ring_moments(ring: Ring, first: Sequence[float], second: Sequence[float], like: Tensor) -> tuple[Tensor, Tensor]:
    """At the place of every entry, the sums of the values and of their squares, each slot times its two factors.

    Slot after slot, and no slot names a place twice: so a GPU, too, adds in the same order each time.
    """
    places, values = ring.places.view(len(first), -1), ring.values.to(like.dtype).view(len(first), -1)
    found: list[Tensor] = []
    for factors, terms in ((first, values), (second, values.square())):
        total = torch.zeros_like(like)
        for where, what, factor in zip(places, terms, factors, strict=True):
            total.index_add_(0, where, what, alpha=factor)
        found.append(total[ring.places])
    return found[0], found[1]
