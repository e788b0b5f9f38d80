"""The simulation: a cohort of clients as one matrix on one device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dpfed import data
from dpfed.algorithm import Counted, Round, Tree, client_round, leaves, like, rows, tree_map, weighted_rows
from dpfed.compiled import Compiler, directly
from dpfed.engines.job import Job as Job
from dpfed.engines.memory import Plan, cache, demand, plan
from dpfed.engines.padding import Batches, batch_shape
from dpfed.errors import InputError
from dpfed.flat import FlatModel, Records, sent
from dpfed.ledger import Event, Receipt
from dpfed.mechanism import Mechanism, calibrated_sigma, expected_size, protection, round_events
from dpfed.privacy import PrivateGradient, Sums, Survey, clipped_upload, survey
from dpfed.secure import secure_noise

PATIENCE = 500  # calls, after which a trace pays on a CPU: it takes what 50 to 600 calls save (benchmarks/NOTES.md)


class Engine(Protocol):
    """Trains a cohort. ``memory`` is what stays on the clients between rounds; a run puts the cohort's there before each."""

    memory: dict[int, Tree]

    def train(self, t: Round, s: Tree, cohort: list[int]) -> tuple[Tree, list[Receipt]]: ...


@dataclass(frozen=True)
class Simulation:
    """A cohort as a matrix on one device.

    Args:
        device: auto takes a GPU where there is one; or cpu, cuda, cuda:1.
        memory_gib: for everything in flight; by default half of a GPU's free memory, or what suits a CPU's caches.
        clients_at_once: rows of the matrix; by default as many as the memory allows. Matrix products round differently for
            other heights: with 1, the results have the same bits as those of clients that train one by one elsewhere.
        precision: of the models' forward and backward passes. Parameters, norms, sums, noise and moments keep float32.
        compile: yes: every step is one compiled program, made once for a model and its shapes. auto: yes on a GPU; on a CPU,
            what has been called 500 times is traced, which changes no bit of the results.
    """

    device: str = "auto"
    memory_gib: float | None = None
    clients_at_once: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: Literal["auto", "yes", "no"] = "auto"

    def __post_init__(self) -> None:
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise InputError(f"engine.memory_gib: must be above 0, got {self.memory_gib}. 1 is enough for small models.")
        if self.clients_at_once is not None and self.clients_at_once < 1:
            raise InputError(f"engine.clients_at_once: must be at least 1, got {self.clients_at_once}.")

    def open(self, job: Job, backend: str = "inductor") -> SimulationEngine:
        """``backend``: of torch.compile."""
        return SimulationEngine(job, self, self.torch_device(), backend)

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
    """``description`` says how it trains; ``startup_seconds`` went into making programs."""

    def __init__(self, job: Job, settings: Simulation, device: torch.device, backend: str = "inductor") -> None:
        dtype = torch.bfloat16 if settings.precision == "bfloat16" else None
        model = job.model.to(device)
        self.job = job._replace(model=model, federation=job.federation.to(device, dtype))
        self.device, self._settings = device, settings
        self.memory = dict[int, Tree]()
        self._compiled = settings.compile == "yes" or (settings.compile == "auto" and device.type == "cuda")
        traced = Compiler("eager", patience=PATIENCE) if settings.compile == "auto" else None
        self._compiler = Compiler(backend) if self._compiled else traced
        held = model.frozen(dtype) if dtype or self._compiler else Records()
        self._sums = Sums(model, self._survey(dtype), dtype, held, self._compiler or directly)
        self._need = demand(model.layout, self._sums.survey, dtype or model.theta0().dtype, job.mechanism.augmentations)
        self._budget, self._cache = math.inf, math.inf
        if settings.memory_gib is not None:
            self._budget = settings.memory_gib * 2**30
        elif device.type == "cuda":
            self._budget = torch.cuda.mem_get_info(device)[0] / 2
        else:
            self._cache = cache(self._need)
        self._planned = self._plan(job.cohort)
        if self._compiler and self._compiled and device.type == "cuda":
            self._compiler.graphs = self._planned.num_bytes < self._budget / 4  # what a graph holds, nothing else can use

    @property
    def description(self) -> str:
        """How it trains, in one line."""
        graphs = self._compiler is not None and self._compiler.graphs
        how = "compiled, with CUDA graphs" if graphs else "compiled" if self._compiled else "eager"
        return f"{self._settings.precision}, {how}; {self._planned.text}"

    @property
    def notes(self) -> list[str]:
        """What did not work, and what was done instead."""
        return self._compiler.notes if self._compiler else []

    @property
    def startup_seconds(self) -> float:
        """What it took until now to make programs."""
        return self._compiler.seconds if self._compiler else 0.0

    def train(self, t: Round, s: Tree, cohort: list[int]) -> tuple[Tree, list[Receipt]]:
        """The weighted mean of the cohort's uploads, summed in client order, and the receipts of what it cost."""
        chosen = self._planned if self._compiled else self._plan(len(cohort))
        weights = client_weights(self.job, cohort)
        total, receipts = None, list[Receipt]()
        for start in range(0, len(cohort), chosen.clients):
            clients = cohort[start : start + chosen.clients]
            setting: dict[str, Any] = {"sums": self._sums, "num_rows": chosen.clients if self._compiled else None}
            uploads, memory, spent = train_matrix(
                self.job, t, s, clients, self.memory, cohort, records_at_once=chosen.records, **setting
            )
            total = weighted_rows(weights[start : start + chosen.clients], uploads, total)
            self.memory.update(memory)
            receipts += spent
        return total, receipts

    def _plan(self, num_clients: int) -> Plan:
        """How many clients, and how many records of each, are in flight at once."""
        width = batch_shape(self.job, num_clients).first
        return plan(self._need, num_clients, width, self._budget, self._cache, self._settings.clients_at_once)

    def _survey(self, dtype: torch.dtype | None) -> Survey:
        if dtype is None:
            return surveyed(self.job)
        try:
            return survey(self.job.model, first_record(self.job), dtype)
        except RuntimeError as error:
            raise InputError(
                f"engine.precision: the model cannot run in {self._settings.precision}: {error}. Take float32, or let the "
                "model make its own tensors in the precision of its inputs."
            ) from error


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
    **setting: Any,
) -> tuple[list[Tree], dict[int, Tree], list[Receipt]]:
    """One round of some clients of a cohort, with an upload each."""
    uploads, kept, receipts = train_matrix(job, t, s, clients, memory, cohort, **setting)
    return rows(uploads, len(clients)), kept, receipts


def train_matrix(
    job: Job,
    t: Round,
    s: Tree,
    clients: list[int],
    memory: dict[int, Tree],
    cohort: list[int] | None = None,
    *,
    records_at_once: int | None = None,
    num_rows: int | None = None,
    sums: Sums | None = None,
) -> tuple[Tree, dict[int, Tree], list[Receipt]]:
    """The same with the uploads as a matrix with a row each. A row does not depend on which others are there.

    ``num_rows``: of the batches, where there are to be more than clients, so that all cohorts have one shape. ``sums``: how the
    sums of gradients are taken; by default eagerly, in the precision of the model.
    """
    cohort = clients if cohort is None else cohort
    sums = Sums(job.model, surveyed(job)) if sums is None else sums
    device, held = s.theta.device, job.federation.sizes
    sizes = sent(torch.tensor([[expected_size(job.mechanism, held[i])] for i in clients], dtype=s.theta.dtype), device)
    batches = Batches(job, clients, t, num_rows or len(clients), records_at_once)
    gradients: list[PrivateGradient] = []
    own: Tensor | float = (
        sent(torch.tensor([[job.factors[i]] for i in clients], dtype=s.theta.dtype), device) if job.factors else 1.0
    )

    def gradient(k: int) -> PrivateGradient:
        def keyed(total: Tensor, std: Tensor | float, draw: int, query: int) -> Tensor:
            random, normal = torch.Generator(device), torch.empty(total.shape, dtype=total.dtype, device=device)
            for i, row in zip(clients, normal.unbind(), strict=True):
                row.normal_(generator=data.keyed(random, data.key(job.seed, "noise", t.index, i, k, draw, query)))
            return total + std * normal

        noise = keyed if job.seed is not None else secure_noise(calibrated_sigma(job.mechanism))
        batch = partial(batches.parts, k)
        gradients.append(PrivateGradient(sums, batch, noise, sizes, job.mechanism, len(cohort), clip=t.clip, factors=own))
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


_surveys: WeakKeyDictionary[FlatModel, dict[Hashable, Survey]] = WeakKeyDictionary()


def surveyed(job: Job) -> Survey:
    """What one record's way through the model is made of; looked at once for records of one shape."""
    record, known = first_record(job), _surveys.setdefault(job.model, {})
    shapes = tuple((name, x.shape, x.dtype, x.device) for name, x in record.items())
    if shapes not in known:
        known[shapes] = survey(job.model, record)
    return known[shapes]


def first_record(job: Job) -> Records:
    """One record, of which only the shapes matter."""
    record = {name: column[0] for name, column in job.federation.records.items()}
    return record | {"key": record["y"].new_zeros((), dtype=torch.long)} if job.model.needs_key else record


def _stack(clients: list[int], memory: dict[int, Tree]) -> Tree:
    """The clients' memories as a matrix; zeros for a client that has none yet; None if none has any."""
    known = [memory[i] for i in clients if i in memory]
    if not known:
        return None
    blank = tree_map(torch.zeros_like, known[0])
    return tree_map(lambda *vectors: torch.stack(vectors), *(memory.get(i, blank) for i in clients))
