"""The simulation: a cohort of clients as one matrix on one device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dpfed import data
from dpfed.algorithm import Algorithm, Counted, Round, Tree, client_round, leaves, like, rows, tree_map, weighted_rows
from dpfed.data import Federation
from dpfed.errors import InputError
from dpfed.flat import FlatModel
from dpfed.keyed import fold
from dpfed.ledger import Event, Receipt
from dpfed.mechanism import Mechanism, calibrated_sigma, expected_size, protection, round_events
from dpfed.privacy import Part, PrivateGradient, clipped_upload
from dpfed.secure import secure_noise


class Job(NamedTuple):
    """All that clients need to know of a run besides the server's state.

    ``seed``: what batches and noise are keyed by in a simulation. None in a deployment: they are secret then, and never repeat.
    ``factors``: what sigma is multiplied by for every client of the federation; none: 1. ``cohort``: the expected size of a
    cohort, by which uploads are divided where clients are the unit.
    """

    model: FlatModel
    federation: Federation
    algorithm: Algorithm
    mechanism: Mechanism
    seed: int | None
    weighting: Literal["uniform", "examples"] = "uniform"
    factors: tuple[float, ...] = ()
    cohort: int = 1


class Engine(Protocol):
    """Trains a cohort. ``memory`` is what stays on the clients between rounds; a run puts the cohort's there before each."""

    memory: dict[int, Tree]

    def train(self, t: Round, s: Tree, cohort: list[int]) -> tuple[Tree, list[Receipt]]: ...


@dataclass(frozen=True)
class Simulation:
    """A cohort as a matrix on one device.

    Args:
        device: auto takes a GPU where there is one; or cpu, cuda, cuda:1.
        memory_gib: for the gradients in flight; by default half of a GPU's free memory, or what suits a CPU's caches.
        clients_at_once: rows of the matrix; by default as many as the memory allows. Matrix products round differently for
            other heights: with 1, the results have the same bits as those of clients that train one by one elsewhere.
    """

    device: str = "auto"
    memory_gib: float | None = None
    clients_at_once: int | None = None

    def __post_init__(self) -> None:
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise InputError(f"engine.memory_gib: must be above 0, got {self.memory_gib}. 1 is enough for small models.")
        if self.clients_at_once is not None and self.clients_at_once < 1:
            raise InputError(f"engine.clients_at_once: must be at least 1, got {self.clients_at_once}.")

    def open(self, job: Job) -> SimulationEngine:
        return SimulationEngine(job, self.torch_device(), self.memory_gib, self.clients_at_once)

    def torch_device(self) -> torch.device:
        name = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise InputError(f"engine.device: {name!r} is not a device. Use auto, cpu, cuda or cuda:1.") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"engine.device: {name!r} was asked for, but torch finds no GPU here. Use --engine.device cpu.")
        return device


class SimulationEngine:
    def __init__(
        self, job: Job, device: torch.device, memory_gib: float | None = None, clients_at_once: int | None = None
    ) -> None:
        self.job = job._replace(model=job.model.to(device), federation=job.federation.to(device))
        self.device, self.memory_gib, self.clients_at_once = device, memory_gib, clients_at_once
        self.memory = dict[int, Tree]()

    def train(self, t: Round, s: Tree, cohort: list[int]) -> tuple[Tree, list[Receipt]]:
        """The weighted mean of the cohort's uploads, summed in client order, and the receipts of what it cost."""
        clients_at_once, records_at_once = self._chunks()
        weights = client_weights(self.job, cohort)
        total, receipts = None, list[Receipt]()
        for start in range(0, len(cohort), clients_at_once):
            clients = cohort[start : start + clients_at_once]
            uploads, memory, spent = train_matrix(self.job, t, s, clients, self.memory, cohort, records_at_once)
            total = weighted_rows(weights[start : start + clients_at_once], uploads, total)
            self.memory.update(memory)
            receipts += spent
        return total, receipts

    def _chunks(self) -> tuple[int, int]:
        """How many clients, and how many records of each, are in flight at once: by the memory of their gradients."""
        if self.memory_gib is not None:
            budget = self.memory_gib * 2**30
        elif self.device.type == "cuda":
            budget = torch.cuda.mem_get_info(self.device)[0] / 2
        else:
            budget = 2**25
        batch = chunk_width(self.job.mechanism.batch_size)
        gradients = max(1, int(budget / (3 * self.job.model.num_parameters * 4)))
        return self.clients_at_once or max(1, gradients // batch), min(batch, gradients)


def client_weights(job: Job, cohort: list[int]) -> list[float]:
    """Public weights of a cohort's uploads. They sum to one; where clients are the unit, in the mean over secret cohorts."""
    if job.mechanism.unit == "client":
        return [1 / job.cohort] * len(cohort)
    held = job.federation.sizes
    sizes = [held[i] if job.weighting == "examples" else 1 for i in cohort]
    total = sum(sizes)
    return [size / total for size in sizes]


def protections(job: Job, cohort: list[int]) -> dict[int, float]:
    """What protects a record of each client of a cohort, as a multiple of sigma: public, and known before they train."""
    held = job.federation.sizes
    sizes = [expected_size(job.mechanism, held[i]) for i in cohort]
    factors = protection(job.mechanism, list(zip(client_weights(job, cohort), sizes, strict=True)))
    own = [job.factors[i] if job.factors else 1.0 for i in cohort]
    return {i: factor * mine for i, factor, mine in zip(cohort, factors, own, strict=True)}


def train_clients(
    job: Job,
    t: Round,
    s: Tree,
    clients: list[int],
    memory: dict[int, Tree],
    cohort: list[int] | None = None,
    records_at_once: int | None = None,
) -> tuple[list[Tree], dict[int, Tree], list[Receipt]]:
    """One round of some clients of a cohort, with an upload each."""
    uploads, kept, receipts = train_matrix(job, t, s, clients, memory, cohort, records_at_once)
    return rows(uploads, len(clients)), kept, receipts


def train_matrix(
    job: Job,
    t: Round,
    s: Tree,
    clients: list[int],
    memory: dict[int, Tree],
    cohort: list[int] | None = None,
    records_at_once: int | None = None,
) -> tuple[Tree, dict[int, Tree], list[Receipt]]:
    """The same with the uploads as a matrix with a row each. A row does not depend on which others are there."""
    cohort = clients if cohort is None else cohort
    device, held = s.theta.device, job.federation.sizes
    expected = [[expected_size(job.mechanism, held[i])] for i in clients]
    sizes = torch.tensor(expected, device=device, dtype=s.theta.dtype)
    gradients: list[PrivateGradient] = []
    own = torch.tensor([[job.factors[i]] for i in clients], device=device, dtype=s.theta.dtype) if job.factors else 1.0

    def gradient(k: int) -> PrivateGradient:
        def batch(draw: int) -> list[Part]:
            return _batch(job, clients, t.index, k, draw, records_at_once)

        def keyed(total: Tensor, std: Tensor | float, draw: int, query: int) -> Tensor:
            random, normal = torch.Generator(device), torch.empty(total.shape, dtype=total.dtype, device=device)
            for i, row in zip(clients, normal.unbind(), strict=True):
                row.normal_(generator=data.keyed(random, data.key(job.seed, "noise", t.index, i, k, draw, query)))
            return total + std * normal

        noise = keyed if job.seed is not None else secure_noise(calibrated_sigma(job.mechanism))
        setting: dict[str, Any] = {"clip": t.clip, "factors": own, "tensors": job.model.layout.sizes}
        gradients.append(PrivateGradient(job.model.loss, batch, noise, sizes, job.mechanism, len(cohort), **setting))
        return gradients[-1]

    uploads, new_memory = client_round(job.algorithm, s, _stack(clients, memory), gradient, t)
    if job.mechanism.unit == "client":
        uploads = _bounded(job.mechanism, uploads, t, len(clients))
    elif job.mechanism.clipping == "adaptive":
        num_calls = sum(sum(step.queries.values()) for step in gradients)
        uploads = Counted(uploads, torch.stack([step.within for step in gradients]).sum(0) / num_calls)
    receipts = receipts_for(job, t.index, clients, cohort, [step.queries for step in gradients])
    kept = {} if new_memory is None else dict(zip(clients, rows(new_memory, len(clients)), strict=True))
    return uploads, kept, receipts


def receipts_for(
    job: Job, t: int, clients: list[int], cohort: list[int], queries: Sequence[Mapping[int, int]], times: int = 1
) -> list[Receipt]:
    """What some clients of a cohort pay for steps with these queries, so many times. Those who are alike share their events."""
    factors, held = protections(job, cohort), job.federation.sizes
    prices: dict[tuple[int, float], Counter[Event]] = {}
    for kind in {(held[i], factors[i]) for i in clients}:
        total = round_events(job.mechanism, kind[0], queries, kind[1], job.federation.footprint)
        prices[kind] = Counter({event: times * count for event, count in total.items()})
    return [Receipt(i, t, prices[held[i], factors[i]]) for i in clients]


def _bounded(mechanism: Mechanism, uploads: Tree, t: Round, num_clients: int) -> Tree:
    """The uploads of a matrix of clients, with all fields of one that depend on data clipped as one vector."""
    fields = {name: field.expand(num_clients, field.shape[-1]) for name, field in leaves(uploads)}
    private = {name: field for name, field in fields.items() if name not in t.public}
    clipped, within = clipped_upload(private, mechanism.clip if t.clip is None else t.clip, mechanism.clipping)
    bounded = like(uploads, fields | clipped)
    return Counted(bounded, within) if mechanism.clipping == "adaptive" else bounded


def chunk_width(batch_size: int) -> int:
    """Columns of the first chunk of a batch: the expected size, rounded up."""
    return 4 * math.ceil(batch_size / 4)


def _batch(job: Job, clients: list[int], t: int, k: int, draw: int, records_at_once: int | None) -> list[Part]:
    """The clients' batches as padded, masked chunks of fixed widths. What a Poisson batch has beyond the expected size runs in
    small further chunks of only those clients that have it; nothing is ever cut off."""
    mechanism, federation, shares = job.mechanism, job.federation, job.federation.shares
    sizes, starts = [shares.sizes[i] for i in clients], torch.tensor([shares.starts[i] for i in clients])
    chosen, counts = data.batches(job.seed, t, clients, k, sizes, mechanism.batch_size, mechanism.sampling, draw)
    width = chunk_width(mechanism.batch_size)
    further = 4 * math.ceil(math.sqrt(mechanism.batch_size) / 2)
    num_columns = width + further * max(0, math.ceil((int(counts.max()) - width) / further))
    row = torch.arange(len(clients)).repeat_interleave(counts)
    column = torch.arange(len(chosen)) - (counts.cumsum(0) - counts)[row]
    mask = torch.arange(num_columns) < counts.unsqueeze(1)
    index, keys = shares.rows[starts].unsqueeze(1).repeat(1, num_columns), torch.zeros_like(mask, dtype=torch.long)
    index[row, column] = shares.rows[starts[row] + chosen]
    if job.model.needs_key:
        names = torch.tensor([data.key(job.seed, "record", t, i, k, draw) for i in clients])
        keys[row, column] = fold(names[row], chosen)
    parts: list[Part] = []
    device = federation.records["y"].device
    start = 0
    while start < num_columns:
        end = min(start + (width if start == 0 else further), num_columns)
        for low in range(start, end, records_at_once or end):
            columns = slice(low, min(low + (records_at_once or end), end))
            some = None if start == 0 else mask[:, start].nonzero().squeeze(1)
            here, valid, own = (index, mask, keys) if some is None else (index[some], mask[some], keys[some])
            chosen = here[:, columns].to(device)
            examples = {name: column[chosen] for name, column in federation.records.items()}
            if job.model.needs_key:
                examples["key"] = own[:, columns].to(device)
            parts.append(Part(examples, valid[:, columns].to(device), None if some is None else some.to(device)))
        start = end
    return parts


def _stack(clients: list[int], memory: dict[int, Tree]) -> Tree:
    """The clients' memories as a matrix; zeros for a client that has none yet; None if none has any."""
    known = [memory[i] for i in clients if i in memory]
    if not known:
        return None
    blank = tree_map(torch.zeros_like, known[0])
    return tree_map(lambda *vectors: torch.stack(vectors), *(memory.get(i, blank) for i in clients))
