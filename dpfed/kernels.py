"""A step of MicroAdam on a GPU, as ten launches in the place of some hundred operations. (Triton; torch for GPUs brings it along.)

Their reference is the plain text, ``algorithms/micro_adam.py`` with ``pieces.py``: error and ring are the same to the bit, the
parameters up to the rounding of a sum; where magnitudes are equal at the edge of a top, the first places are taken.

    survey      a = g + Q^-1(e), of which every group's greatest magnitude is counted. There are more groups than the k entries of
                a top: so the k-th largest of their greatest is at most the k-th largest of all, and a bound
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

# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# Triton's language is Python by its grammar only.

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfed.pieces import Quantised, Ring, constant, num_kept

CHUNK = 4096
"""Coordinates that one program looks at; blocks of the quantiser must fit into it."""


class Settings(Protocol):
    """What a step asks of the algorithm."""

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

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Spread:
        addresses = [tensor.data_ptr() for tensor in tensors]
        width = tensors[0].element_size()
        return cls(tensors[0], constant(tuple((address - addresses[0]) // width for address in addresses), tensors[0].device))

    @classmethod
    def inside(cls, whole: Tensor, sizes: Sequence[int]) -> Spread:
        """One vector that holds them all, one behind the other."""
        return cls(whole, constant(tuple(accumulate([0, *sizes[:-1]])), whole.device))


class Plan(NamedTuple):
    """Whose each chunk is, and a row for every tensor: size, first coordinate, kept, first kept, first block, first chunk."""

    owners: Tensor
    table: Tensor
    num_kept: int
    most_kept: int


COLUMNS = tl.constexpr(6)
BINS = tl.constexpr(2048)
"""Of magnitudes, 32 to an octave, from 2^-48 on; what is less is in the first one, and what is more in the last."""
LOWEST = tl.constexpr((127 - 48) * 32)


@lru_cache(maxsize=256)
def _plan(sizes: tuple[int, ...], density: float, block: int, device: torch.device) -> Plan:
    kept = [num_kept(size, density) for size in sizes]
    blocks, chunks = ([-(-size // length) for size in sizes] for length in (block, CHUNK))
    firsts = [list(accumulate([0, *column[:-1]])) for column in (sizes, kept, blocks, chunks)]
    rows = torch.tensor([sizes, firsts[0], kept, *firsts[1:]], dtype=torch.int32).t().contiguous()
    owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(chunks))
    return Plan(owners.to(device), rows.to(device), sum(kept), max(kept))


def micro_adam_(
    a: Settings,
    index: int,
    lr: float,
    theta: Spread,
    gradient: Spread,
    error: Quantised,
    ring: Ring,
    sizes: Sequence[int],
    *,
    whole: bool,
) -> None:
    """The step number ``index``, in place, but for the decay of the weights.

    Places count from the beginning of the whole vector if there is one (``whole``), else from that of their tensor.
    """
    device, num_tensors, slot = theta.first.device, len(sizes), index % a.window
    plan = _plan(tuple(sizes), a.density, a.quant_block, device)
    num_chunks = len(plan.owners)
    bins, counts = torch.zeros(num_tensors * (2048 + 4 * 256), dtype=torch.int32, device=device).split(
        [num_tensors * 2048, num_tensors * 4 * 256]
    )
    lengths, reach, edges = torch.empty(num_chunks * 258 + num_tensors * 2, dtype=torch.int32, device=device).split(
        [num_chunks, num_chunks * 257, num_tensors * 2]
    )
    scratch = torch.empty(2 * num_chunks * CHUNK, device=device)  # first the lists, then the sums
    found, standing = scratch.split(num_chunks * CHUNK)
    powers = constant(tuple(beta**age for beta in (a.beta1, a.beta2) for age in range(a.window)), device, torch.float32)
    counted = index + 1 if a.bias_correction == "paper" else min(index + 1, a.window)
    scales = [(1 - beta) / (1 - beta**counted) for beta in (a.beta1, a.beta2)]
    group = min(a.quant_block, 1 << math.floor(math.log2(1 / a.density)))

    grid, chunks = (num_chunks,), (plan.owners, plan.table)
    whence = (*gradient, *error, *chunks)
    exact = {"num_warps": 8, "enable_fp_fusion": False}  # a is computed three times, and has to be the same each time
    short = {"num_warps": 4, "enable_fp_fusion": False}
    with torch.cuda.device_of(theta.first):
        _survey[grid](*whence, bins, CHUNK, a.quant_block, group, **exact)
        _gather[grid](*whence, bins, found, standing, lengths, CHUNK, a.quant_block, **exact)
        lists = (found, standing, lengths, *chunks, counts, reach, num_tensors, num_chunks)
        for known in range(4):
            _count[grid](*lists, known, CHUNK, **short)
        _move[grid](*lists, edges, *ring, slot * plan.num_kept, CHUNK, whole, **short)
        _quantise[grid](*whence, edges, CHUNK, a.quant_block, **exact)
        numbers = (plan.num_kept, 1 << plan.most_kept.bit_length() - 1, slot, min(index + 1, a.window), lr, a.eps, *scales)
        shape = (CHUNK, a.window, triton.next_power_of_2(a.window), whole)
        _update[grid](*theta, *ring, scratch, powers, *chunks, *numbers, *shape, **short)


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
def _added(gradient, offsets, codes, low, high, table, tensor, program, chunk: tl.constexpr, block: tl.constexpr):
    """a = g + Q^-1(e) of a chunk, with a row for every block; where each stands in its tensor, whether it does, and its block."""
    size, first_block = tl.load(table + COLUMNS * tensor), tl.load(table + COLUMNS * tensor + 4)
    rows: tl.constexpr = chunk // block
    row = (program - tl.load(table + COLUMNS * tensor + 5)) * rows + tl.arange(0, rows)
    place = row[:, None] * block + tl.arange(0, block)[None, :]
    inside, full, number = place < size, row * block < size, (first_block + row).to(tl.int64)
    pairs = number[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
    pair = tl.load(codes + pairs, mask=full[:, None], other=0)
    code = tl.reshape(tl.join(pair >> 4, pair & 15), [rows, block]).to(tl.float32)
    start = tl.load(low + number, mask=full, other=0.0).to(tl.float32)
    unit = tl.div_rn(tl.load(high + number, mask=full, other=0.0).to(tl.float32) - start, 15.0)
    g = tl.load(gradient + tl.load(offsets + tensor) + place, mask=inside, other=0.0)
    return g + (code * unit[:, None] + start[:, None]), place, inside, number, full


@triton.jit
def _survey(
    gradient, offsets, codes, low, high, owners, table, bins,
    chunk: tl.constexpr, block: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Counts every group by its greatest magnitude."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    a, _, inside, _, _ = _added(gradient, offsets, codes, low, high, table, tensor, program, chunk, block)
    octave = tl.where(inside, (_magnitude(a) >> 19).to(tl.int32), -1)
    greatest = tl.max(tl.reshape(octave, [chunk // group, group]), 1)
    bin = tl.minimum(tl.maximum(greatest - LOWEST, 0), BINS - 1)
    tl.atomic_add(bins + tensor * BINS + bin, greatest * 0 + 1, mask=greatest >= 0, sem="relaxed")


@triton.jit
def _gather(
    gradient, offsets, codes, low, high, owners, table, bins, found, standing, lengths,
    chunk: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Lists what reaches the bound, and where it stands, in that order."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    reached = tl.cumsum(tl.load(bins + tensor * BINS + tl.arange(0, BINS)), 0, reverse=True)
    last = tl.sum((reached >= tl.load(table + COLUMNS * tensor + 2)).to(tl.int32), 0) - 1
    bound = tl.where(last > 0, last + LOWEST, 0).to(tl.uint32) << 19
    a, place, inside, _, _ = _added(gradient, offsets, codes, low, high, table, tensor, program, chunk, block)
    a, place = tl.reshape(a, [chunk]), tl.reshape(place, [chunk])
    held = tl.reshape(inside, [chunk]) & (_magnitude(a) >= bound)
    number = tl.cumsum(held.to(tl.int32), 0)
    at = program.to(tl.int64) * chunk + number - 1
    tl.store(found + at, a, mask=held)
    tl.store(standing + at, place.to(tl.float32, bitcast=True), mask=held)
    tl.store(lengths + program, tl.sum(held.to(tl.int32), 0))


@triton.jit
def _edge(counts, table, tensor, num_tensors, known: tl.constexpr):
    """The first bytes of the k-th largest magnitude, and how many of those that begin like it are among the k."""
    byte = tl.arange(0, 256)
    begins, wanted = 0, tl.load(table + COLUMNS * tensor + 2)
    for number in tl.static_range(known):
        count = tl.load(counts + (number * num_tensors + tensor) * 256 + byte)
        found = tl.sum((tl.cumsum(count, 0, reverse=True) >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(byte > found, count, 0), 0)
        begins = begins * 256 + found.to(tl.uint32)
    return begins, wanted


@triton.jit(do_not_specialize=["num_tensors", "num_chunks"])
def _count(
    found, standing, lengths, owners, table, counts, reach, num_tensors, num_chunks, known: tl.constexpr, chunk: tl.constexpr
):
    """Counts the byte behind the ``known`` ones. Of the last byte it is noted, too, how many in each chunk reach which value."""
    program = tl.program_id(0)
    tensor, length = tl.load(owners + program), tl.load(lengths + program)
    byte = tl.arange(0, 256)
    count, larger = tl.zeros([256], tl.int32), 0
    if known > 0:
        begins, _ = _edge(counts, table, tensor, num_tensors, known)
    start = 0
    while start < length:
        alike = start + byte < length
        magnitude = _magnitude(tl.load(found + program.to(tl.int64) * chunk + start + byte, mask=alike, other=0.0))
        if known > 0:
            beginning = magnitude >> (32 - 8 * known)
            larger += tl.sum((alike & (beginning > begins)).to(tl.int32), 0)
            alike = alike & (beginning == begins)
        count += tl.histogram(((magnitude >> (24 - 8 * known)) & 255).to(tl.int32), 256, mask=alike)
        start += 256
    tl.atomic_add(counts + (known * num_tensors + tensor) * 256 + byte, count, mask=count > 0, sem="relaxed")
    if known == 3:
        tl.store(reach + byte * num_chunks + program, tl.cumsum(count, 0, reverse=True) + larger)
        tl.store(reach + 256 * num_chunks + program, larger)


@triton.jit(do_not_specialize=["num_tensors", "num_chunks", "begin"])
def _move(
    found, standing, lengths, owners, table, counts, reach, num_tensors, num_chunks, edges, places, values, begin,
    chunk: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """The top moves into the slot that begins at ``begin``. Noted: the least magnitude in it, and the last place of that one."""
    program = tl.program_id(0)
    tensor, length = tl.load(owners + program), tl.load(lengths + program)
    edge, wanted = _edge(counts, table, tensor, num_tensors, 4)
    value = (edge & 255).to(tl.int32)
    larger_before, reached_before = 0, 0  # in the chunks of the tensor before this one
    start = tl.load(table + COLUMNS * tensor + 5)
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
    entry = tl.arange(0, 256)
    start = 0
    while start < length:
        held = start + entry < length
        listed = program.to(tl.int64) * chunk + start + entry
        a = tl.load(found + listed, mask=held, other=0.0)
        place = tl.load(standing + listed, mask=held, other=0.0).to(tl.int32, bitcast=True)
        magnitude = _magnitude(a)
        larger, equal = (held & (magnitude > edge)).to(tl.int32), (held & (magnitude == edge)).to(tl.int32)
        equal_ahead = equal_before + tl.cumsum(equal, 0) - equal
        at = into + larger_before + tl.cumsum(larger, 0) - larger + tl.minimum(equal_ahead, wanted)
        top = (larger > 0) | ((equal > 0) & (equal_ahead < wanted))
        tl.store(places + at, place + shift, mask=top)
        tl.store(values + at, _narrow(a), mask=top)
        last = (equal > 0) & (equal_ahead == wanted - 1)
        tl.store(edges + 2 * tensor + entry * 0, tl.zeros([256], tl.int32) + edge.to(tl.int32, bitcast=True), mask=last)
        tl.store(edges + 2 * tensor + 1 + entry * 0, place, mask=last)
        larger_before += tl.sum(larger, 0)
        equal_before += tl.sum(equal, 0)
        start += 256


@triton.jit
def _quantise(gradient, offsets, codes, low, high, owners, table, edges, chunk: tl.constexpr, block: tl.constexpr):
    """What has not moved is the new error."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    a, place, inside, number, full = _added(gradient, offsets, codes, low, high, table, tensor, program, chunk, block)
    edge, last = tl.load(edges + 2 * tensor).to(tl.uint32, bitcast=True), tl.load(edges + 2 * tensor + 1)
    magnitude = _magnitude(a)
    a = tl.where((magnitude > edge) | ((magnitude == edge) & (place <= last)), 0.0, a)
    least = tl.min(tl.where(inside, a, float("inf")), 1)
    greatest = tl.max(tl.where(inside, a, float("-inf")), 1)
    unknown = tl.max((inside & (a != a)).to(tl.int32), 1) > 0  # not a number: nor are the ends then
    least, greatest = _narrow(tl.where(unknown, float("nan"), least)), _narrow(tl.where(unknown, float("nan"), greatest))
    tl.store(low + number, least, mask=full)
    tl.store(high + number, greatest, mask=full)
    start = least.to(tl.float32)
    unit = tl.div_rn(greatest.to(tl.float32) - start, 15.0)
    unit = tl.where(unit == 0, float("inf"), unit)
    code = tl.floor(tl.div_rn(tl.where(inside, a - start[:, None], 0.0), unit[:, None]) + 0.5)
    code = tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.int32)
    upper, lower = tl.split(tl.reshape(code, [chunk // block, block // 2, 2]))
    pairs = number[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
    tl.store(codes + pairs, (upper * 16 + lower).to(tl.uint8), mask=full[:, None])


@triton.jit(do_not_specialize=["num_kept", "highest", "newest", "filled"])
def _update(
    theta, offsets, places, values, sums, powers, owners, table, num_kept, highest, newest, filled, lr, eps, scale1, scale2,
    chunk: tl.constexpr, window: tl.constexpr, slots: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """theta <- theta - lr mhat / (eps + sqrt(vhat)), at the places of one chunk that the filled slots hold.

    The places of a slot ascend within a tensor, so those of the chunk are found by bisection. Slot after slot is added up, and
    no slot names a place twice. In the end whoever comes to a place first takes its vhat away, and moves it.
    """
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    size, origin = tl.load(table + COLUMNS * tensor), tl.load(table + COLUMNS * tensor + 1)
    kept, first_kept = tl.load(table + COLUMNS * tensor + 2), tl.load(table + COLUMNS * tensor + 3)
    shift = origin
    if not whole:
        shift = origin * 0
    first = (program - tl.load(table + COLUMNS * tensor + 5)) * chunk
    begin, end = first + shift, tl.minimum(first + chunk, size) + shift

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
            at = start + entry
            held = at < last
            place = tl.load(places + own + at, mask=held, other=0).to(tl.int64) - shift + origin
            value = tl.load(values + own + at, mask=held, other=0.0).to(tl.float32)
            m, v = tl.load(sums + 2 * place, mask=held, other=0.0), tl.load(sums + 2 * place + 1, mask=held, other=0.0)
            tl.store(sums + 2 * place, m + first_power * value, mask=held)
            tl.store(sums + 2 * place + 1, v + second_power * (value * value), mask=held)
            start += 64
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
