"""Batches of random size as chunks of fixed shape: the shapes with which the least is computed in vain. Nothing is cut off."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpfed import data
from dpfed.algorithm import Round
from dpfed.data import Drawing
from dpfed.engines.job import Job
from dpfed.flat import sent
from dpfed.keyed import fold
from dpfed.privacy import Part

CALL = (
    0.25  # what one further chunk costs whatever is in it, in expected batches of all clients; measured (benchmarks/NOTES.md)
)


class Shape(NamedTuple):
    """The first chunk has ``first`` columns for every client, each further one ``further`` columns for ``rows`` clients."""

    first: int
    further: int = 0
    rows: int = 0


@lru_cache(maxsize=256)
def shape_of(batch_size: int, num_clients: int, sampling: Drawing, largest: int) -> Shape:
    """For clients of up to ``largest`` records. The size of a Poisson batch is taken to be a Poisson number.

    >>> shape_of(16, 5, "fixed", 1000), shape_of(16, 5, "poisson", 12)
    (Shape(first=16, further=0, rows=0), Shape(first=12, further=0, rows=0))
    """
    if sampling != "poisson" or largest <= batch_size:
        return Shape(min(batch_size, largest))
    spread = math.sqrt(batch_size)
    end = min(largest, math.ceil(batch_size + 8 * spread + 8))
    sizes = np.arange(end + 1)
    chances = np.exp(sizes * math.log(batch_size) - batch_size - np.array([math.lgamma(size + 1) for size in sizes]))
    more = np.append(np.cumsum(chances[::-1])[::-1][1:], 0.0)  # P(size > w)
    widths = {min(end, math.ceil(batch_size + spread * part / 4)) for part in range(17)}
    shapes = itertools.product(
        sorted(widths),
        sorted({math.ceil(spread * part / 2) for part in range(1, 5)}),
        sorted({math.ceil(num_clients / part) for part in (1, 2, 4, 8)}),
    )

    def cost(shape: Shape) -> float:
        """The expected number of records that are computed, over all clients, and what the calls cost besides."""
        calls = sum(_calls(num_clients, float(more[w]), shape.rows) for w in range(shape.first, len(more), shape.further))
        return num_clients * shape.first + calls * (shape.rows * shape.further + CALL * num_clients * batch_size)

    return min(itertools.starmap(Shape, shapes), key=cost)


@lru_cache(maxsize=4096)
def _calls(num_clients: int, chance: float, rows: int) -> float:
    """How many chunks of so many rows are needed for those clients, each by its own coin, that have more."""
    if chance < 1e-12:
        return 0.0
    counts = np.arange(num_clients + 1)
    logs = [math.lgamma(num_clients + 1) - math.lgamma(c + 1) - math.lgamma(num_clients - c + 1) for c in counts]
    chances = np.exp(np.array(logs) + counts * math.log(chance) + (num_clients - counts) * math.log1p(-chance))
    return float((chances * np.ceil(counts / rows)).sum())


def batch_shape(job: Job, num_rows: int) -> Shape:
    return shape_of(job.mechanism.batch_size, num_rows, job.mechanism.sampling, job.federation.shares.largest)


class _Chunk(NamedTuple):
    """Which records, ``~`` those that only pad; the records' own keys; and whose, if not everybody's."""

    which: Tensor
    keys: Tensor | None
    rows: Tensor | None


def _padding(index: np.ndarray) -> np.ndarray:
    """The same records as mere padding."""
    return np.where(index >= 0, ~index, index)


class Batches:
    """The batches of some clients in one round, as padded, masked chunks of fixed shapes; nothing is ever cut off.

    What a Poisson batch has beyond the first chunk runs in further ones, of some rows each. All that is drawn for the steps of
    the round goes to the device in one piece. A record that only pads is one of the same client, and is masked; if the client
    has any in the batch it is one of them, as what is not finite would spoil a sum without clipping from behind a mask, too.
    """

    def __init__(self, job: Job, clients: list[int], t: Round, num_rows: int, records_at_once: int | None = None) -> None:
        self._job, self._clients, self._t, self._num_rows = job, clients, t, num_rows
        self._at_once, shape = records_at_once or math.inf, batch_shape(job, num_rows)
        self._shape = shape._replace(first=self._pieces(shape.first)[-1].stop, further=self._pieces(shape.further)[-1].stop)
        self._drawn = dict[int, list[list[_Chunk]]]()

    def parts(self, k: int, draw: int) -> list[Part]:
        """The batch of step ``k``: gathered from the records, where they are."""
        if draw not in self._drawn:
            self._drawn[draw] = self._sent([self._draw(step, draw) for step in range(self._t.num_steps)])
        return [self._part(chunk) for chunk in self._drawn[draw][k]]

    def _pieces(self, width: int) -> list[slice]:
        """Columns of equal width, few enough to be in flight at once, and at least so many together."""
        num_pieces = max(1, math.ceil(width / self._at_once))
        each = math.ceil(width / num_pieces)
        return [slice(low, low + each) for low in range(0, num_pieces * each, max(1, each))] or [slice(0, 0)]

    def _part(self, chunk: _Chunk) -> Part:
        mask = chunk.which >= 0
        index = torch.where(mask, chunk.which, ~chunk.which)
        examples = {name: column[index] for name, column in self._job.federation.records.items()}
        return Part(examples if chunk.keys is None else examples | {"key": chunk.keys}, mask, chunk.rows)

    def _draw(self, k: int, draw: int) -> list[_Chunk]:
        job, t, num_steps, num_clients = self._job, self._t.index, self._t.num_steps, len(self._clients)
        mechanism, shares = job.mechanism, job.federation.shares
        sizes, starts = [shares.sizes[i] for i in self._clients], np.array([shares.starts[i] for i in self._clients])
        size, sampling = mechanism.batch_size, mechanism.sampling
        chosen, counts = data.batches(job.seed, t, self._clients, k, num_steps, sizes, size, sampling, draw)
        (first, further, rows), most = self._shape, int(counts.max())
        num_columns = first + further * max(0, math.ceil((most - first) / max(1, further)))
        index, keys = np.zeros((2, self._num_rows, num_columns), np.int64)
        row, own = np.arange(num_clients).repeat(counts), shares.rows.numpy()
        begin = counts.cumsum() - counts
        column, least = np.arange(len(chosen)) - begin[row], np.append(chosen, 0)[begin] * (counts > 0)
        index[:num_clients] = ~own[starts + least][:, None]
        index[row, column] = own[starts[row] + chosen]
        if job.model.needs_key:
            names = torch.tensor([data.key(job.seed, "record", t, i, k, draw) for i in self._clients])
            keys[row, column] = fold(names[row], torch.from_numpy(chosen)).numpy()
        everyone = None
        if self._num_rows > num_clients:
            everyone = np.arange(self._num_rows) % num_clients
            index[num_clients:] = _padding(index[everyone[num_clients:], :1])
        chunks = self._chunks(index, keys, everyone, first)
        for low in range(first, num_columns, max(1, further)):
            over = [place for place, count in enumerate(counts.tolist()) if count > low]
            for start in range(0, len(over), rows):
                here = np.array((over[start : start + rows] + over[:1] * rows)[:rows])
                mine, theirs = index[here, low : low + further], keys[here, low : low + further]
                mine[len(over) - start :] = _padding(mine[len(over) - start :])
                chunks += self._chunks(mine, theirs, here, further)
        return chunks

    def _chunks(self, index: np.ndarray, keys: np.ndarray, rows: np.ndarray | None, width: int) -> list[_Chunk]:
        """The first columns, as many as may be in flight in each."""
        named, whose = self._job.model.needs_key, None if rows is None else torch.from_numpy(rows)
        which, names = torch.from_numpy(index), torch.from_numpy(keys)
        return [_Chunk(which[:, some], names[:, some] if named else None, whose) for some in self._pieces(width)]

    def _sent(self, steps: list[list[_Chunk]]) -> list[list[_Chunk]]:
        """The same chunks on the device, in one transfer that nobody waits for."""
        device = self._job.federation.records["y"].device
        if device.type == "cpu":
            return steps
        tensors = [x for step in steps for chunk in step for x in chunk if x is not None]
        whole = sent(torch.cat([x.flatten() for x in tensors]), device)
        pieces = iter(whole.split([x.numel() for x in tensors]))

        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else next(pieces).view(x.shape)

        return [[chunk._make(map(moved, chunk)) for chunk in step] for step in steps]
