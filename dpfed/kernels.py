"""A step of MicroAdam on a GPU: ten launches in the place of some hundred operations. (In Triton, which torch for GPUs brings.)

Their reference is the plain text, ``algorithms/micro_adam.py`` with ``pieces.py``: error and ring are the same to the bit, the
parameters up to the rounding of a sum; where magnitudes are equal at the edge of a top, the first places are taken.

    survey      a = g + Q^-1(e) of half the coordinates, of which every group's greatest magnitude is counted. There are no
                fewer groups than a top has entries: so the k-th largest of their greatest is a bound of the k-th largest of all
    gather      a again: what reaches the bound is listed, a few entries in a hundred
    count       four times, of the lists: how often each byte of the magnitudes occurs, the first one first, and of those alone
                that begin like the k-th largest as far as that is known
    move        the top of the lists goes into the oldest slot, in the order of its places
    quantise    a for the last time: e <- Q(what has not moved)
    update      the sums over the slots, and with them the parameters

A program sees one chunk of one tensor. What a chunk has to know of others passes from launch to launch, nothing waits inside of
one, and what is added in an order that may vary are whole numbers: so every run has the same bits. Between steps nothing is
kept but what the algorithm remembers, and nothing is ever sent back to the host.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# Triton's language is Python by its grammar only.

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfed.pieces import Quantised, Ring, constant, decayed, num_kept

CHUNK = 4096
"""Coordinates that one program looks at; blocks of the quantiser must fit into it."""
STRETCH = 4096
"""Coordinates whose places in the ring one program of ``update`` adds up: it looks at few of them, and waits for each."""

DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
"""Whether what Triton has compiled can be started without it, with a kernel's arguments, constants among them."""
_PROGRAMS: dict[Any, list[Any]] = {}
"""The compiled kernels of a step. Triton itself takes longer to find them by their arguments than most of them run."""


class Settings(Protocol):
    """What a step asks of the algorithm."""

    @property
    def weight_decay(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def density(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def quant_block(self) -> int: ...
    @property
    def bias_correction(self) -> Literal["paper", "window"]: ...


class Spread(NamedTuple):
    """Tensors wherever they lie: the first one, and how many coordinates behind its beginning each of them begins."""

    first: Tensor
    offsets: Tensor
    aligned: bool

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Spread:
        first, addresses = tensors[0], [tensor.data_ptr() for tensor in tensors]
        return cls._at(first, tuple((address - addresses[0]) // first.element_size() for address in addresses))

    @classmethod
    def inside(cls, whole: Tensor, sizes: Sequence[int]) -> Spread:
        """One vector that holds them all, one behind the other."""
        return cls._at(whole, tuple(accumulate([0, *sizes[:-1]])))

    @classmethod
    def _at(cls, first: Tensor, offsets: tuple[int, ...]) -> Spread:
        aligned = first.data_ptr() % 16 == 0 and all(offset % 4 == 0 for offset in offsets)
        return cls(first, constant(offsets, first.device), aligned)


class Plan(NamedTuple):
    """Whose each chunk and each stretch is, and a row for every tensor.

    Its size, first coordinate, kept, first kept, first block, first byte of codes, first chunk, first stretch.
    """

    chunks: Tensor
    stretches: Tensor
    table: Tensor
    num_kept: int
    most_kept: int


COLUMNS = tl.constexpr(8)
BINS = tl.constexpr(2048)
"""Of magnitudes, 32 to an octave, from 2^-48 on; what is less is in the first one, and what is more in the last."""
LOWEST = tl.constexpr((127 - 48) * 32)


@lru_cache(maxsize=256)
def _plan(sizes: tuple[int, ...], density: float, block: int, chunk: int, stretch: int, device: torch.device) -> Plan:
    kept = [num_kept(size, density) for size in sizes]
    blocks, chunks, stretches = ([-(-size // length) for size in sizes] for length in (block, chunk, stretch))
    codes = [number * block // 2 for number in blocks]
    firsts = [list(accumulate([0, *column[:-1]])) for column in (sizes, kept, blocks, codes, chunks, stretches)]
    rows = torch.tensor([sizes, firsts[0], kept, *firsts[1:]], dtype=torch.int32).t().contiguous()
    numbers = torch.arange(len(sizes), dtype=torch.int32)
    owners = [numbers.repeat_interleave(torch.tensor(column)).to(device) for column in (chunks, stretches)]
    return Plan(owners[0], owners[1], rows.to(device), sum(kept), max(kept))


def micro_adam(
    a: Settings, index: int, lr: float, theta: Tensor, gradient: Tensor, error: Quantised, ring: Ring, sizes: Sequence[int]
) -> tuple[Tensor, Quantised, Ring]:
    """The step number ``index`` of vectors, which stay what they are."""
    theta, ring, left = (
        decayed(theta, lr, a.weight_decay),
        Ring(*map(torch.clone, ring)),
        Quantised(*map(torch.empty_like, error)),
    )
    micro_adam_(a, index, lr, Spread.inside(theta, sizes), Spread.inside(gradient, sizes), error, left, ring, sizes, whole=True)
    return theta, left, ring


def micro_adam_(
    a: Settings,
    index: int,
    lr: float,
    theta: Spread,
    gradient: Spread,
    error: Quantised,
    left: Quantised,
    ring: Ring,
    sizes: Sequence[int],
    *,
    whole: bool,
) -> None:
    """The same in place, of tensors that may lie apart, and without the decay of the weights. ``left`` is the new error.

    Places count from the beginning of the whole vector if there is one (``whole``), else from that of their tensor.
    """
    device, num_tensors, slot = theta.first.device, len(sizes), index % a.window
    plan = _plan(tuple(sizes), a.density, a.quant_block, CHUNK, STRETCH, device)
    num_chunks = len(plan.chunks)
    widths = [num_tensors * BINS.value, num_tensors * 4 * 256]
    bins, counts = torch.zeros(sum(widths), dtype=torch.int32, device=device).split(widths)
    lengths, reach, edges = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (num_chunks, num_chunks * 257, num_tensors * 2)
    )
    lists = torch.empty(num_chunks * CHUNK, dtype=torch.int64, device=device)
    sums = lists.view(torch.float32)  # when nobody needs the lists any more
    powers = constant(tuple(beta**age for beta in (a.beta1, a.beta2) for age in range(a.window)), device, torch.float32)
    counted = index + 1 if a.bias_correction == "paper" else min(index + 1, a.window)
    scales = [(1 - beta) / (1 - beta**counted) for beta in (a.beta1, a.beta2)]
    group = min(a.quant_block, 1 << math.floor(math.log2(1 / a.density)))
    some = (a.quant_block // 2, gradient.aligned, group // 2) if group > 1 else (a.quant_block, gradient.aligned, 1)

    tensors = (theta.first, theta.offsets, gradient.first, gradient.offsets, *error, *left, *ring, *plan[:3])
    tensors = (*tensors, bins, counts, lengths, reach, edges, lists, sums, powers)
    addresses = [tensor.data_ptr() for tensor in tensors]
    kinds = [(tensor.dtype, address % 16 == 0) for tensor, address in zip(tensors, addresses, strict=True)]
    begin, shape = slot * plan.num_kept, (CHUNK, a.quant_block)
    key = (device, *kinds, *shape, *some, STRETCH, a.window, whole, begin < 2**31)  # all that Triton looks at
    programs = _PROGRAMS.get(key)
    x, xs, g, gs, *rest = addresses if programs else tensors
    codes, low, high, new_codes, new_low, new_high, places, values, chunks, stretches, table, *rest = rest
    bins, counts, lengths, reach, edges, lists, sums, powers = rest

    whence, owners = (g, gs, codes, low, high, chunks, table), (chunks, table)
    listed = (lists, lengths, *owners, counts, reach, num_tensors, num_chunks)
    numbers = (plan.num_kept, 1 << plan.most_kept.bit_length() - 1, slot, min(index + 1, a.window))
    held = (places, values, sums, powers, stretches, table, *numbers, float(lr), float(a.eps), *scales)
    slots = (a.window, max(2, triton.next_power_of_2(a.window)))  # times 64: no fewer than a program has threads
    short = {"num_warps": 4, "enable_fp_fusion": False}  # a is computed three times, and has to be the same each time
    long = short | {"num_warps": 8} | ({"maxnreg": 64} if gradient.aligned else {})  # so four have room on a multiprocessor
    launches = [
        (_survey, num_chunks, (*whence, bins, *shape, *some), long),
        (_gather, num_chunks, (*whence, bins, lists, lengths, *shape, gradient.aligned), long),
        *((_count, num_chunks, (*listed, known, CHUNK), short) for known in range(4)),
        (_move, num_chunks, (*listed, edges, places, values, begin, CHUNK, whole), short),
        (_quantise, num_chunks, (*whence, edges, new_codes, new_low, new_high, *shape, gradient.aligned), long),
        (_update, len(plan.stretches), (x, xs, *held, STRETCH, *slots, whole), short),
    ]
    with torch.cuda.device_of(theta.first):
        if programs:
            stream = torch.cuda.current_stream(device).cuda_stream
            for program, (_kernel, number, given, _options) in zip(programs, launches, strict=True):
                program[number, 1, 1](*given, stream=stream)
        else:
            programs = [kernel[(number,)](*given, **options) for kernel, number, given, options in launches]
            if DIRECT and all(programs):
                _PROGRAMS[key] = programs


@triton.jit
def _magnitude(a):
    """The bits of |a|, which grow as it does, moved up by one: four whole bytes."""
    return a.to(tl.uint32, bitcast=True) << 1


@triton.jit
def _narrow(a):
    """In bfloat16, to the nearest, to the even one of two. (Triton's interpreter cuts off what this leaves nothing of.)"""
    bits = a.to(tl.uint32, bitcast=True)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.uint32)
    return tl.where(a == a, nearest.to(tl.float32, bitcast=True), a).to(tl.bfloat16)


@triton.jit
def _added(
    gradient, offsets, codes, low, high, owners, table, program,
    chunk: tl.constexpr, block: tl.constexpr, width: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """a = g + Q^-1(e) of the first ``width`` of every block, a row each, as far as its tensor goes; where they stand in it."""
    tensor = tl.load(owners + program)
    rows: tl.constexpr = chunk // block
    size = tl.load(table + COLUMNS * tensor)
    row = (program - tl.load(table + COLUMNS * tensor + 6)) * rows + tl.arange(0, rows)
    place = row[:, None] * block + tl.arange(0, width)[None, :]
    full, number = row * block < size, (tl.load(table + COLUMNS * tensor + 4) + row).to(tl.int64)
    pair = tl.load(codes + _pairs(table, tensor, row, block, width), mask=full[:, None], other=0)
    code = tl.reshape(tl.join(pair >> 4, pair & 15), [rows, width]).to(tl.float32)
    start = tl.load(low + number, mask=full, other=0.0).to(tl.float32)
    unit = tl.div_rn(tl.load(high + number, mask=full, other=0.0).to(tl.float32) - start, 15.0)
    offset = tl.load(offsets + tensor)
    if aligned:  # four coordinates at once, and the last four, too, as nobody's memory ends inside of 16 bytes
        g = tl.load(gradient + tl.multiple_of(offset, 4) + place, mask=place < (size + 3) // 4 * 4, other=0.0)
    else:
        g = tl.load(gradient + offset + place, mask=place < size, other=0.0)
    return g + (code * unit[:, None] + start[:, None]), place, place < size, number, row, full


@triton.jit
def _pairs(table, tensor, row, block: tl.constexpr, width: tl.constexpr):
    """Where the codes of some blocks stand. A thread should read two bytes at once, not more: then it has what it has of g."""
    first = tl.multiple_of(tl.load(table + COLUMNS * tensor + 5), 2)
    return first.to(tl.int64) + row[:, None] * (block // 2) + tl.arange(0, width // 2)[None, :]


@triton.jit
def _survey(
    gradient, offsets, codes, low, high, owners, table, bins,
    chunk: tl.constexpr, block: tl.constexpr, width: tl.constexpr, aligned: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Counts every group by its greatest magnitude."""
    program = tl.program_id(0)
    a, _, inside, _, _, _ = _added(gradient, offsets, codes, low, high, owners, table, program, chunk, block, width, aligned)
    octave = tl.where(inside, (_magnitude(a) >> 19).to(tl.int32), -1)
    greatest = tl.max(tl.reshape(octave, [chunk // block * width // group, group]), 1)
    bin = tl.minimum(tl.maximum(greatest - LOWEST, 0), BINS - 1)
    tl.atomic_add(bins + tl.load(owners + program) * BINS + bin, greatest * 0 + 1, mask=greatest >= 0, sem="relaxed")


@triton.jit
def _gather(
    gradient, offsets, codes, low, high, owners, table, bins, lists, lengths,
    chunk: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """Lists what reaches the bound, and where it stands, in that order."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    reached = _at_least(tl.load(bins + tensor * BINS + tl.arange(0, BINS)))
    last = tl.sum((reached >= tl.load(table + COLUMNS * tensor + 2)).to(tl.int32), 0) - 1
    bound = tl.where(last > 0, last + LOWEST, 0).to(tl.uint32) << 19
    a, place, inside, _, _, _ = _added(
        gradient, offsets, codes, low, high, owners, table, program, chunk, block, block, aligned
    )
    held = (inside & (_magnitude(a) >= bound)).to(tl.int32)
    both = (place.to(tl.int64) << 32) | a.to(tl.uint32, bitcast=True).to(tl.int64)
    held0, held1, held2, held3 = _quarters(held, chunk)  # of every four neighbours, which are a thread's own
    both0, both1, both2, both3 = _quarters(both, chunk)
    of_four = held0 + held1 + held2 + held3
    into = lists + program.to(tl.int64) * chunk + (tl.cumsum(of_four, 0) - of_four)
    tl.store(into, both0, mask=held0 > 0)
    tl.store(into + held0, both1, mask=held1 > 0)
    tl.store(into + held0 + held1, both2, mask=held2 > 0)
    tl.store(into + held0 + held1 + held2, both3, mask=held3 > 0)
    tl.store(lengths + program, tl.sum(of_four, 0))


@triton.jit
def _quarters(x, chunk: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, [chunk // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _listed(lists, program, start, length, chunk: tl.constexpr):
    """The 256 entries of a chunk's list from ``start`` on, where they stand, and which of them there are."""
    entry = start + tl.arange(0, 256)
    both = tl.load(lists + program.to(tl.int64) * chunk + entry, mask=entry < length, other=0)
    return both.to(tl.uint32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32), entry < length


@triton.jit
def _at_least(count):
    """How many are in each bin and those above it."""
    return tl.sum(count, 0) - tl.cumsum(count, 0) + count


@triton.jit
def _edge(counts, table, tensor, num_tensors, known: tl.constexpr):
    """The first bytes of the k-th largest magnitude, and how many of those that begin like it are among the k."""
    byte = tl.arange(0, 256)
    begins, wanted = 0, tl.load(table + COLUMNS * tensor + 2)
    for number in tl.static_range(known):
        count = tl.load(counts + (number * num_tensors + tensor) * 256 + byte)
        found = tl.sum((_at_least(count) >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(byte > found, count, 0), 0)
        begins = begins * 256 + found.to(tl.uint32)
    return begins, wanted


@triton.jit(do_not_specialize=["num_tensors", "num_chunks"])
def _count(lists, lengths, owners, table, counts, reach, num_tensors, num_chunks, known: tl.constexpr, chunk: tl.constexpr):
    """Counts the byte behind the ``known`` ones. Of the last byte it is noted, too, how many of a chunk reach what."""
    program = tl.program_id(0)
    tensor, length = tl.load(owners + program), tl.load(lengths + program)
    byte = tl.arange(0, 256)
    count, larger = tl.zeros([256], tl.int32), 0
    begins, _wanted = _edge(counts, table, tensor, num_tensors, known)
    start = 0
    while start < length:
        a, _place, alike = _listed(lists, program, start, length, chunk)
        magnitude = _magnitude(a)
        if known > 0:
            beginning = magnitude >> (32 - 8 * known)
            larger += tl.sum((alike & (beginning > begins)).to(tl.int32), 0)
            alike = alike & (beginning == begins)
        counted = tl.where(alike, ((magnitude >> (24 - 8 * known)) & 255).to(tl.int32), 0)
        count += tl.histogram(counted, 256) - tl.where(byte == 0, 256 - tl.sum(alike.to(tl.int32), 0), 0)
        start += 256
    tl.atomic_add(counts + (known * num_tensors + tensor) * 256 + byte, count, mask=count > 0, sem="relaxed")
    if known == 3:
        tl.store(reach + byte * num_chunks + program, _at_least(count) + larger)
        tl.store(reach + 256 * num_chunks + program, larger)


@triton.jit(do_not_specialize=["num_tensors", "num_chunks", "begin"])
def _move(
    lists, lengths, owners, table, counts, reach, num_tensors, num_chunks, edges, places, values, begin,
    chunk: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """The top moves into the slot that begins at ``begin``. Noted: the edge of the top, and its last place."""
    program = tl.program_id(0)
    tensor, length = tl.load(owners + program), tl.load(lengths + program)
    edge, wanted = _edge(counts, table, tensor, num_tensors, 4)
    value = (edge & 255).to(tl.int32)
    larger_before, reached_before = 0, 0  # in the chunks of the tensor before this one
    start = tl.load(table + COLUMNS * tensor + 6)
    while start < program:
        other = start + tl.arange(0, 1024)
        before = other < program
        larger_before += tl.sum(tl.load(reach + (value + 1) * num_chunks + other, mask=before, other=0), 0)
        reached_before += tl.sum(tl.load(reach + value * num_chunks + other, mask=before, other=0), 0)
        start += 1024
    equal_before = reached_before - larger_before
    into = begin.to(tl.int64) + tl.load(table + COLUMNS * tensor + 3)
    shift = tl.load(table + COLUMNS * tensor + 1)
    if not whole:
        shift = 0
    start = 0
    while start < length:
        a, place, held = _listed(lists, program, start, length, chunk)
        magnitude = _magnitude(a)
        larger, equal = (held & (magnitude > edge)).to(tl.int32), (held & (magnitude == edge)).to(tl.int32)
        equal_ahead = equal_before + tl.cumsum(equal, 0) - equal
        at = into + larger_before + tl.cumsum(larger, 0) - larger + tl.minimum(equal_ahead, wanted)
        top = (larger > 0) | ((equal > 0) & (equal_ahead < wanted))
        tl.store(places + at, place + shift, mask=top)
        tl.store(values + at, _narrow(a), mask=top)
        last = (equal > 0) & (equal_ahead == wanted - 1)
        noted = edges + 2 * tensor + place * 0
        tl.store(noted, place * 0 + edge.to(tl.int32, bitcast=True), mask=last)
        tl.store(noted + 1, place, mask=last)
        larger_before += tl.sum(larger, 0)
        equal_before += tl.sum(equal, 0)
        start += 256


@triton.jit
def _quantise(
    gradient, offsets, codes, low, high, owners, table, edges, new_codes, new_low, new_high,
    chunk: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """What has not moved is the new error."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    a, place, inside, number, row, full = _added(
        gradient, offsets, codes, low, high, owners, table, program, chunk, block, block, aligned
    )
    edge, last = tl.load(edges + 2 * tensor).to(tl.uint32, bitcast=True), tl.load(edges + 2 * tensor + 1)
    magnitude = _magnitude(a)
    a = tl.where((magnitude > edge) | ((magnitude == edge) & (place <= last)), 0.0, a)
    least = tl.min(tl.where(inside, a, float("inf")), 1)
    greatest = tl.max(tl.where(inside, a, float("-inf")), 1)
    if edge > 0xFF000000:  # more than infinity: some that is not a number may have stayed, and then the ends are none, either
        unknown = tl.max((inside & (a != a)).to(tl.int32), 1) > 0
        least, greatest = tl.where(unknown, float("nan"), least), tl.where(unknown, float("nan"), greatest)
    least, greatest = _narrow(least), _narrow(greatest)
    tl.store(new_low + number, least, mask=full)
    tl.store(new_high + number, greatest, mask=full)
    start = least.to(tl.float32)
    unit = tl.div_rn(greatest.to(tl.float32) - start, 15.0)
    unit = tl.where(unit == 0, float("inf"), unit)
    code = tl.floor(tl.div_rn(tl.where(inside, a - start[:, None], 0.0), unit[:, None]) + 0.5)
    code = tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.int32)
    upper, lower = tl.split(tl.reshape(code, [chunk // block, block // 2, 2]))
    tl.store(new_codes + _pairs(table, tensor, row, block, block), (upper * 16 + lower).to(tl.uint8), mask=full[:, None])


@triton.jit(do_not_specialize=["num_kept", "highest", "newest", "filled"])
def _update(
    theta, offsets, places, values, sums, powers, owners, table, num_kept, highest, newest, filled, lr, eps, scale1, scale2,
    stretch: tl.constexpr, window: tl.constexpr, slots: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """theta <- theta - lr mhat / (eps + sqrt(vhat)), at the places of one stretch that the filled slots hold.

    The places of a slot ascend within a tensor, so those of the stretch are found by bisection. Slot after slot is added up,
    and no slot names a place twice. In the end whoever comes to a place first takes its vhat away, and moves it.
    """
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    size, origin = tl.load(table + COLUMNS * tensor), tl.load(table + COLUMNS * tensor + 1)
    kept, first_kept = tl.load(table + COLUMNS * tensor + 2), tl.load(table + COLUMNS * tensor + 3)
    shift = origin
    if not whole:
        shift = origin * 0
    first = (program - tl.load(table + COLUMNS * tensor + 7)) * stretch
    begin, end = first + shift, tl.minimum(first + stretch, size) + shift

    slot = tl.arange(0, slots)
    row = slot.to(tl.int64) * num_kept + first_kept
    low, high = tl.zeros([slots], tl.int32), tl.zeros([slots], tl.int32)
    step = highest
    while step > 0:
        low_further, high_further = low + step, high + step
        low_within, high_within = (slot < filled) & (low_further <= kept), (slot < filled) & (high_further <= kept)
        low_place = tl.load(places + row + low_further - 1, mask=low_within, other=0)
        high_place = tl.load(places + row + high_further - 1, mask=high_within, other=0)
        low = tl.where(low_within & (low_place < begin), low_further, low)
        high = tl.where(high_within & (high_place < end), high_further, high)
        step = step // 2
    most = tl.max(high - low, 0)

    entry = tl.arange(0, 64)
    start = most * 0
    while start < most:
        at = (low + start)[:, None] + entry[None, :]
        held = at < high[:, None]
        place = tl.load(places + row[:, None] + at, mask=held, other=0).to(tl.int64) - shift + origin
        tl.store(sums + 2 * place, tl.zeros([slots, 64], tl.float32), mask=held)
        tl.store(sums + 2 * place + 1, tl.zeros([slots, 64], tl.float32), mask=held)
        start += 64
    tl.debug_barrier()
    number = filled * 0
    while number < filled:
        age = (newest - number + window) % window
        first_power, second_power = tl.load(powers + age), tl.load(powers + window + age)
        own = tl.sum(tl.where(slot == number, row, 0), 0)
        start, last = tl.sum(tl.where(slot == number, low, 0), 0), tl.sum(tl.where(slot == number, high, 0), 0)
        while start < last:
            at = start + tl.arange(0, 256)
            held = at < last
            place = tl.load(places + own + at, mask=held, other=0).to(tl.int64) - shift + origin
            value = tl.load(values + own + at, mask=held, other=0.0).to(tl.float32)
            m, v = tl.load(sums + 2 * place, mask=held, other=0.0), tl.load(sums + 2 * place + 1, mask=held, other=0.0)
            tl.store(sums + 2 * place, m + first_power * value, mask=held)
            tl.store(sums + 2 * place + 1, v + second_power * (value * value), mask=held)
            start += 256
        tl.debug_barrier()
        number += 1
    start = most * 0
    while start < most:
        at = (low + start)[:, None] + entry[None, :]
        held = at < high[:, None]
        place = tl.load(places + row[:, None] + at, mask=held, other=0).to(tl.int64) - shift
        mine = sums + 2 * (place + origin)
        m = tl.load(mine, mask=held, other=0.0)
        second = (mine + 1).to(tl.pointer_type(tl.int32), bitcast=True)
        bits = tl.atomic_xchg(second, tl.full([slots, 64], -1, tl.int32), mask=held, sem="relaxed")
        held = held & (bits != -1)
        v = tl.where(held, bits, 0).to(tl.float32, bitcast=True)
        moved = theta + tl.load(offsets + tensor) + place
        move = tl.div_rn(lr * (scale1 * m), eps + tl.sqrt_rn(scale2 * v))
        tl.store(moved, tl.load(moved, mask=held, other=0.0) - move, mask=held)
        start += 64
