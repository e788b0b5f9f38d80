"""The round loop: the only one.

    s = algorithm.server_init(theta0)
    for t in rounds:  charge the cohort  ->  train it  ->  average  ->  server_step  ->  write the row

The charge is written before the release (a crash may over-count, never under-count), and a round is done again with the same
keys after a crash, so a resumed run ends in the same bits as one that was never stopped. Where clients are the unit, the server
adds the noise between "average" and "server_step", once a round, also when nobody came: that tells nothing about who did.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfed.algorithm import Counted, Round, Tree, leaves, like, num_bytes
from dpfed.data import Federation, generator
from dpfed.diagnostics import columns, own_upload
from dpfed.engines.simulation import Engine, Job, client_weights
from dpfed.errors import InputError
from dpfed.flat import FlatModel
from dpfed.forecast import Forecast, blank_upload, coins, forecast, planned_receipts, public_fields
from dpfed.forecast import dry_round as dry_round
from dpfed.forecast import planned_events as planned_events
from dpfed.ledger import Receipt, bills
from dpfed.mechanism import Gaussian, calibrated_sigma, expected_size, reach
from dpfed.memories import Memories
from dpfed.pieces import Moment, no_moment, push, schedule_scale
from dpfed.privacy import next_clip, noised_upload
from dpfed.recipe import Recipe, to_json
from dpfed.record import RunRecord, environment

Row = dict[str, Any]


class Standing(NamedTuple):
    """What a run carries from round to round besides the clients' memories: all of it lies in the checkpoint.

    ``clip`` is the threshold of adaptive clipping, ``average`` that of the published models; empty where there is none.
    """

    s: Tree
    clip: Tensor
    average: Moment


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
    plan = forecast(recipe, model, federation)
    plain = to_json(recipe) | {
        "name": recipe.name,
        "sigma": plan.job.mechanism.sigma,
        "fingerprint": fingerprint(model, federation),
    }
    record = _resumed(plain, out) if resume else None
    opened = (engine or recipe.engine.open)(plan.job)
    if record is None:
        found = environment(str(recipe.engine.torch_device())) | {"engine": getattr(opened, "description", "")}
        record = RunRecord.create(out or free_folder(recipe.name), plain, found, recipe.delta)
    return record, _rounds(recipe, record, opened, plan)


def _resumed(plain: dict[str, Any], out: str | Path | None) -> RunRecord:
    if out is None:
        raise InputError("out: name the folder of the run to resume.")
    record = RunRecord.open(out)
    differing = sorted(key for key in plain | record.recipe if plain.get(key) != record.recipe.get(key))
    if differing:
        raise InputError(
            f"recipe: differs from the one of the run in {record.path} in: {', '.join(differing)}. A run goes on with the "
            "recipe, model and data it began with; start a new run for other ones."
        )
    return record


def _rounds(recipe: Recipe, record: RunRecord, engine: Engine, plan: Forecast) -> Iterator[Row]:
    try:
        yield from _training(recipe, record, engine, plan)
    finally:
        record.close()  # also when nobody draws the rest of the rows


def _training(recipe: Recipe, record: RunRecord, engine: Engine, plan: Forecast) -> Iterator[Row]:
    job, device = plan.job, recipe.engine.torch_device()
    now, first = _beginning(recipe, job, job.model.theta0().to(device)), 0
    stored = record.restore()
    if stored is not None:
        first, tensors = stored
        tensors = _to(device, tensors)
        now = like(now, tensors)
    needed = [] if stored is None else stored[1]["memories"].tolist()
    record.rewind(first)
    memories = Memories(record.path, record.fingerprint(), first, needed)
    since, cost, known = time.monotonic(), 0.0, Startup()
    for t in range(first, plan.num_rounds):
        began, last, cohort = time.monotonic(), t == plan.num_rounds - 1, plan.cohorts[t]
        receipts = planned_receipts(recipe, job, t, cohort, plan.dry)
        record.charge(receipts, coins(recipe, job, t))
        row: Row = {"t": t, "clients": len(cohort), "bytes_down": num_bytes(now.s), "bytes_up": 0}
        if cohort or job.mechanism.unit == "client":
            announced = _announced(recipe, job, t, now, cohort)
            engine.memory.clear()
            engine.memory |= {i: like(plan.dry.memory, _to(device, kept)) for i, kept in memories.of(cohort).items()}
            now, upload = _step(engine, job, now, announced, cohort, receipts)
            memories.keep(t, {i: dict(leaves(kept)) for i, kept in engine.memory.items()})
            row["bytes_up"] = num_bytes(own_upload(upload))
            if recipe.diagnostics:
                noise_var = noise_variance(job, cohort, announced.clip)
                row["diagnostics"] = columns(recipe.algorithm, now.s, upload, announced, noise_var)
        if not bool(now.s.theta.isfinite().all()):
            raise InputError(
                f"algorithm.lr: the parameters became NaN or Inf in round {t}; the learning rate is too large. Lower it and "
                f"start again. The rows until then are in {record.path}."
            )
        now = now._replace(average=_averaged(recipe, now, t, plan.num_rounds))
        if (t + 1) % recipe.evaluate_every == 0 or last:
            row |= _judged(recipe, job, now)
            row["epsilon"] = record.ledger.before(t + 1).epsilon(recipe.delta)  # it may know of rounds that are done again
        if last and plan.ending:
            row["ended_by"] = plan.ending
        row["seconds"] = round(time.monotonic() - began, 4)
        known, news = _startup(engine, known)
        row |= news
        record.append(row)
        if last or time.monotonic() - since > 20 * cost:
            since = time.monotonic()
            memories.settle()
            record.checkpoint(dict(leaves(now)) | {"memories": torch.tensor(memories.rounds(), dtype=torch.long)}, t + 1)
            memories.tidy()
            cost = time.monotonic() - since
        yield row
    if not record.finished:
        record.save_model(job.model.layout.views(_published(now)))


class Startup(NamedTuple):
    """What an engine took to make its programs, and what it had to do without."""

    seconds: float = 0.0
    num_notes: int = 0


def _startup(engine: Engine, known: Startup) -> tuple[Startup, Row]:
    """What there is to say since the last round: only an engine that compiles has anything."""
    seconds, notes = getattr(engine, "startup_seconds", 0.0), getattr(engine, "notes", [])
    news: Row = {"startup_seconds": round(seconds - known.seconds, 2)} if seconds > known.seconds else {}
    return Startup(seconds, len(notes)), news | ({"notes": notes[known.num_notes :]} if notes[known.num_notes :] else {})


def _beginning(recipe: Recipe, job: Job, theta: Tensor) -> Standing:
    s = job.algorithm.server_init(theta, job.model.layout)
    clip = [job.mechanism.clip] if job.mechanism.clipping == "adaptive" else []
    return Standing(s, torch.tensor(clip, dtype=torch.float64), no_moment(theta[:0] if recipe.average == "none" else theta))


def _announced(recipe: Recipe, job: Job, t: int, now: Standing, cohort: list[int]) -> Round:
    """Round ``t`` as everybody sees it: where clients are the unit, without a trace of who takes part."""
    by_client = job.mechanism.unit == "client"
    weights = [1 / recipe.cohort] * recipe.cohort if by_client else client_weights(job, cohort)
    scale = schedule_scale(recipe.schedule, t, recipe.rounds, recipe.warmup)
    share, shrinkage = len(weights) / len(job.federation.clients), sum(weight**2 for weight in weights)
    clip = float(now.clip) if len(now.clip) else None
    announced = Round(t, scale, recipe.local_steps, job.model.layout, shrinkage, share, clip)
    return replace(announced, public=public_fields(job.algorithm, announced)) if by_client else announced


def _step(engine: Engine, job: Job, now: Standing, t: Round, cohort: list[int], plan: list[Receipt]) -> tuple[Standing, Tree]:
    """What stands after the round, and the mean of what was uploaded."""
    by_client = job.mechanism.unit == "client"
    upload: Tree = None
    receipts = list[Receipt]()
    if cohort:
        upload, receipts = engine.train(t, now.s, cohort)
    if bills(receipts) != bills([Receipt(i, t.index, Counter()) for i in cohort] if by_client else plan):
        raise RuntimeError(f"round {t.index}: the engine spent other events than were charged; nothing of it is released")
    if by_client:
        upload = _noised(job, now.s, t, upload)
    clip = now.clip
    if isinstance(job.mechanism, Gaussian) and t.clip is not None:
        upload, within = upload
        clip = torch.full_like(clip, next_clip(t.clip, float(within) + 0.5, job.mechanism.quantile))
    return now._replace(s=job.algorithm.server_step(now.s, upload, t), clip=clip), upload


def _noised(job: Job, s: Tree, t: Round, total: Tree) -> Tree:
    """A cohort's sum of clipped uploads with the server's noise; where nobody came, the noise alone."""
    blank = blank_upload(job.algorithm, s, t)
    if t.clip is not None:
        blank = Counted(blank, s.theta.new_zeros(1))
    everybodys = {name for name, _ in leaves(blank)} & {f"upload.{name}" if t.clip is not None else name for name in t.public}
    sums = dict(leaves(total)) or {name: torch.zeros_like(field) for name, field in leaves(blank)}
    private = {name: field for name, field in sums.items() if name not in everybodys}
    random = generator(job.seed, "server noise", t.index, device=s.theta.device)
    return like(blank, dict(leaves(blank)) | noised_upload(private, job.mechanism, t.clip, job.cohort, random))


def noise_variance(job: Job, cohort: list[int], clip: float | None = None) -> float:
    """Phi = (sigma C / B)^2 of a client's gradient, the mean over the cohort."""
    mechanism = job.mechanism
    if mechanism.unit == "client" or not mechanism.sigma:
        return 0.0
    share = math.sqrt(len(cohort)) if mechanism.noise == "distributed" else 1.0
    std = calibrated_sigma(mechanism) * reach(mechanism.clipping, mechanism.clip if clip is None else clip) / share
    return fmean(
        ((job.factors[i] if job.factors else 1.0) * std / expected_size(mechanism, job.federation.sizes[i])) ** 2
        for i in cohort
    )


def _averaged(recipe: Recipe, now: Standing, t: int, num_rounds: int) -> Moment:
    """The average of the published models, with the newest one in it."""
    if recipe.average == "tail" and t >= num_rounds // 2:
        return Moment(now.average.value + now.s.theta, now.average.weight + 1)
    return push(now.average, now.s.theta, recipe.average_decay) if recipe.average == "ema" else now.average


def _published(now: Standing) -> Tensor:
    """The average; the last model while there is none."""
    return now.average.mean if float(now.average.weight) else now.s.theta


def _judged(recipe: Recipe, job: Job, now: Standing) -> Row:
    """The published model on the test records; beside an average, the last model, too."""
    if job.federation.test is None:
        return {}
    judged: Row = job.model.evaluate(_published(now), job.federation.test, job.federation.test_clients)
    if recipe.average == "none":
        return judged
    last = job.model.evaluate(now.s.theta, job.federation.test, job.federation.test_clients)
    model = recipe.average if float(now.average.weight) else "last"
    return {**judged, "model": model, **{f"last_{name}": value for name, value in last.items()}}


def _to(device: torch.device, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def fingerprint(model: FlatModel, federation: Federation) -> str:
    """Of the starting point and of who holds what, so that a run is never resumed with another model or other data."""
    content = hashlib.blake2b(digest_size=16)
    test = federation.test or {}
    columns = [("theta0", model.theta0()), *federation.records.items(), *test.items()]
    shares = [("rows", federation.shares.rows), ("sizes", torch.tensor(federation.sizes))]
    for name, vector in [*columns, *shares]:
        content.update(f"{name}{tuple(vector.shape)}{vector.dtype}".encode())
        content.update(vector.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def free_folder(name: str) -> Path:
    """A new folder under ``runs/``."""
    taken = (Path("runs") / f"{name}-{number}" for number in range(1, 1_000_000))
    return next(path for path in taken if not path.exists())
