"""The round loop: the only one.

    s = algorithm.server_init(theta0)
    for t in rounds:  charge the cohort  ->  train it  ->  average  ->  server_step  ->  write the row

The charge is written before the release (a crash may over-count, never under-count), and a round is done again with the same
keys after a crash, so a resumed run ends in the same bits as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Algorithm, Round, Tree, client_round, like, num_bytes
from dpfed.algorithm import leaves as named
from dpfed.data import Federation, generator
from dpfed.diagnostics import Observed, columns, own_upload
from dpfed.engines.simulation import Engine, Job, client_weights, memory_tensors, protections
from dpfed.errors import InputError
from dpfed.flat import FlatModel, Layout, Part
from dpfed.ledger import Event, Ledger, Receipt, calibrate
from dpfed.pieces import schedule_scale
from dpfed.privacy import Mechanism, Plain, events, expected_size
from dpfed.recipe import Recipe, to_json
from dpfed.record import RunRecord, environment

Row = dict[str, Any]


class DryGradient:
    """Counts what an algorithm asks for, and always gives the same answer."""

    def __init__(self, answer: Tensor) -> None:
        self.queries: Counter[int] = Counter()
        self.noise_var, self.answer = answer.new_zeros(1), answer

    def __call__(self, theta: Tensor, *, draw: int = 0, minus: tuple[float, Tensor] | None = None) -> Tensor:
        self.queries[draw] += 1
        return self.answer


class Dry(NamedTuple):
    """What a client's round will be: the gradients that every step asks for, and the structure of its memory."""

    queries: list[Counter[int]]
    memory: Tree


def dry_round(algorithm: Algorithm, num_steps: int) -> Dry:
    """Run the algorithm once on a tiny vector. It declares nothing, so it can declare nothing wrongly."""
    steps = [DryGradient(torch.zeros(8)) for _ in range(num_steps)]
    layout = Layout((Part("tiny", (8,), "weights"),))
    s = algorithm.server_init(torch.zeros(8), layout)
    _, memory = client_round(algorithm, s, None, steps.__getitem__, Round(0, 1.0, num_steps, layout))
    return Dry([step.queries for step in steps], memory)


def planned_events(mechanism: Mechanism, num_examples: int, dry: Dry, factor: float = 1.0) -> Counter[Event]:
    """What one round costs a client whose ``protection`` is ``factor``."""
    total: Counter[Event] = Counter()
    for queries in dry.queries:
        total.update(events(mechanism, num_examples, queries, factor))
    return total


def planned_receipts(job: Job, t: int, cohort: list[int], dry: Dry) -> list[Receipt]:
    """What round ``t`` will cost its cohort: public, and known before it happens."""
    factors, sizes = protections(job, cohort), job.federation.sizes
    return [Receipt(i, t, planned_events(job.mechanism, sizes[i], dry, factors[i])) for i in cohort]


def calibrated(recipe: Recipe, job: Job, dry: Dry) -> Recipe:
    """The recipe with its target epsilon turned into the smallest sufficient sigma, for the participations that will happen."""
    mechanism = recipe.mechanism
    if isinstance(mechanism, Plain) or mechanism.epsilon is None:
        return recipe
    unit, plan = job._replace(mechanism=replace(mechanism, epsilon=None, sigma=1.0)), Ledger()
    for t in range(recipe.rounds):
        plan.post(planned_receipts(unit, t, job.federation.cohort(recipe.seed, t, recipe.cohort), dry))
    sigma = calibrate(mechanism.epsilon, recipe.delta, [plan.events(i) for i in plan.clients()])
    return replace(recipe, mechanism=replace(mechanism, epsilon=None, sigma=sigma))


def refuse_unsound(recipe: Recipe, dry: Dry) -> None:
    """Distributed noise protects a sum of releases. Whatever else an algorithm would do with them has too little noise."""
    if recipe.mechanism.noise == "local":
        return
    name = type(recipe.algorithm).__name__
    if [dict(step) for step in dry.queries] != [{0: 1}]:
        raise InputError(
            f"mechanism.noise: 'distributed' protects one gradient a round, but {name} with local_steps={recipe.local_steps} "
            f"takes {sum(sum(step.values()) for step in dry.queries)}. Set local_steps=1, or noise='local'."
        )
    if dry.memory is not None or not _upload_is_linear(recipe.algorithm):
        raise InputError(
            f"mechanism.noise: 'distributed' protects only sums, but the uploads of {name} are not linear in its gradient, "
            "or it keeps a memory. Take an algorithm whose server steps, such as AdamW, SGD or AdamWBC, or noise='local'."
        )


def _upload_is_linear(algorithm: Algorithm) -> bool:
    """Tried, not declared: upload(a) + upload(b) = upload(a + b) + upload(0)."""
    theta, a, b = torch.randn(3, 8, generator=generator(0, "linear"), dtype=torch.float64)
    layout = Layout((Part("tiny", (8,), "weights"),))
    s = algorithm.server_init(theta, layout)

    def upload(gradient: Tensor) -> Tensor:
        step = DryGradient(gradient)
        return torch.cat([x for _, x in named(client_round(algorithm, s, None, lambda k: step, Round(0, 1.0, 1, layout))[0])])

    return torch.allclose(upload(a) + upload(b), upload(a + b) + upload(torch.zeros_like(a)), rtol=1e-9, atol=1e-9)


def run(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    engine: Callable[[Job], Engine] | None = None,
) -> RunRecord:
    """Train, and return the record, with ``.table()``, ``.statement()``, ``.rows``, ``.load_model()``. It lies in ``out``.

    ``resume=True`` goes on with the run in ``out``. Without ``out`` a new folder under ``runs/`` is taken.
    """
    record, rows = begin(recipe, out, resume=resume, engine=engine)
    for _ in rows:
        pass
    return record


def begin(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    engine: Callable[[Job], Engine] | None = None,
) -> tuple[RunRecord, Iterator[Row]]:
    """Check everything and open the record; the rounds happen as the rows are drawn."""
    model, federation = recipe.task.build(recipe.seed)
    if recipe.cohort > len(federation.clients):
        raise InputError(
            f"cohort: {recipe.cohort} clients a round were asked for, the federation has {len(federation.clients)}. Lower it."
        )
    model.check(federation.records, federation.test, federation.test_clients)
    dry = dry_round(recipe.algorithm, recipe.local_steps)
    refuse_unsound(recipe, dry)
    job = Job(model, federation, recipe.algorithm, recipe.mechanism, recipe.seed, recipe.weighting)
    planned = calibrated(recipe, job, dry)
    job = job._replace(mechanism=planned.mechanism)
    if recipe.diagnostics and recipe.mechanism.noise == "local":
        job = job._replace(algorithm=Observed(recipe.algorithm))
    plain = to_json(recipe) | {
        "name": recipe.name,
        "sigma": planned.mechanism.sigma,
        "fingerprint": fingerprint(model, federation),
    }
    if resume:
        if out is None:
            raise InputError("out: name the folder of the run to resume.")
        record = RunRecord.open(out)
        differing = sorted(key for key in plain | record.recipe if plain.get(key) != record.recipe.get(key))
        if differing:
            raise InputError(
                f"recipe: differs from the one of the run in {record.path} in: {', '.join(differing)}. A run goes on with the "
                "recipe, model and data it began with; start a new run for other ones."
            )
    else:
        device = str(recipe.engine.torch_device())
        record = RunRecord.create(out or free_folder(recipe.name), plain, environment(device), recipe.delta)
    return record, _rounds(planned, record, (engine or recipe.engine.open)(job), job)


def _rounds(recipe: Recipe, record: RunRecord, engine: Engine, job: Job) -> Iterator[Row]:
    try:
        yield from _training(recipe, record, engine, job)
    finally:
        record.close()  # also when nobody draws the rest of the rows


def _training(recipe: Recipe, record: RunRecord, engine: Engine, job: Job) -> Iterator[Row]:
    algorithm, layout = recipe.algorithm, job.model.layout
    device = recipe.engine.torch_device()
    theta0 = job.model.theta0().to(device)
    s, first, dry = algorithm.server_init(theta0, layout), 0, dry_round(algorithm, recipe.local_steps)
    stored = record.restore()
    if stored is not None:
        first, tensors = stored
        tensors = {name: vector.to(device) for name, vector in tensors.items()}
        s = like(s, {name.removeprefix("s."): v for name, v in tensors.items() if name.startswith("s.")})
        engine.memory.update(_memory(dry.memory, tensors))
    record.rewind(first)
    spent = Ledger()  # the record's may know already of rounds that are done again
    spent.post(receipt for receipt in record.ledger if receipt.t < first)
    test = None if job.federation.test is None else {name: c.to(device) for name, c in job.federation.test.items()}
    since, cost = time.monotonic(), 0.0
    for t in range(first, recipe.rounds):
        began = time.monotonic()
        cohort = job.federation.cohort(recipe.seed, t, recipe.cohort)
        plan = planned_receipts(job, t, cohort, dry)
        record.charge(plan)
        spent.post(plan)
        scale = schedule_scale(recipe.schedule, t, recipe.rounds, recipe.warmup)
        shrinkage = sum(weight**2 for weight in client_weights(job, cohort))
        participation = len(cohort) / len(job.federation.clients)
        now = Round(t, scale, recipe.local_steps, layout, shrinkage, participation)
        bytes_down = num_bytes(s)
        upload, receipts = engine.train(now, s, cohort)
        if sorted(receipts) != plan:
            raise RuntimeError(f"round {t}: the engine spent other events than were charged; nothing of it is released")
        s = algorithm.server_step(s, own_upload(upload), now)
        if not bool(s.theta.isfinite().all()):
            raise InputError(
                f"algorithm.lr: the parameters became NaN or Inf in round {t}; the learning rate is too large. Lower it and "
                f"start again. The rows until then are in {record.path}."
            )
        row: Row = {"t": t, "clients": len(cohort), "bytes_down": bytes_down, "bytes_up": num_bytes(own_upload(upload))}
        if recipe.diagnostics:
            noise_var = noise_variance(job, cohort)
            row["diagnostics"] = columns(algorithm, s, upload, now, noise_var)
        if (t + 1) % recipe.evaluate_every == 0 or t == recipe.rounds - 1:
            if test is not None:
                row |= job.model.evaluate(s.theta, test, job.federation.test_clients)
            row["epsilon"] = spent.epsilon(recipe.delta)
        row["seconds"] = round(time.monotonic() - began, 4)
        record.append(row)
        if t == recipe.rounds - 1 or time.monotonic() - since > 20 * cost:
            since = time.monotonic()
            state = {f"s.{name}": vector for name, vector in named(s)}
            record.checkpoint(state | memory_tensors(engine.memory), t + 1)
            cost = time.monotonic() - since
        yield row
    if not record.finished:
        record.save_model(job.model.layout.views(s.theta))


def noise_variance(job: Job, cohort: list[int]) -> float:
    """Phi = (sigma C / B)^2 of a client's gradient, the mean over the cohort."""
    mechanism, sizes = job.mechanism, [expected_size(job.mechanism, job.federation.sizes[i]) for i in cohort]
    if not mechanism.sigma:
        return 0.0
    share = len(cohort) if mechanism.noise == "distributed" else 1
    return fmean((mechanism.sigma * mechanism.clip / size) ** 2 / share for size in sizes)


def _memory(structure: Tree, tensors: dict[str, Tensor]) -> dict[int, Tree]:
    clients: dict[int, dict[str, Tensor]] = {}
    for name, vector in tensors.items():
        if name.startswith("memory."):
            _, i, field = name.split(".", 2)
            clients.setdefault(int(i), {})[field] = vector
    return {i: like(structure, fields) for i, fields in clients.items()}


def fingerprint(model: FlatModel, federation: Federation) -> str:
    """Of the starting point and of who holds what, so that a run is never resumed with another model or other data."""
    content = hashlib.blake2b(digest_size=16)
    test = federation.test or {}
    columns = [("theta0", model.theta0()), *federation.records.items(), *test.items()]
    for name, vector in [*columns, *((str(i), rows) for i, rows in enumerate(federation.clients))]:
        content.update(f"{name}{tuple(vector.shape)}{vector.dtype}".encode())
        content.update(vector.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def free_folder(name: str) -> Path:
    """A new folder under ``runs/``."""
    taken = (Path("runs") / f"{name}-{number}" for number in range(1, 1_000_000))
    return next(path for path in taken if not path.exists())
