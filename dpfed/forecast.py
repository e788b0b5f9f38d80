"""What a run is going to do, before it does it: who takes part when, what they will ask for, what that costs, what is unsound.

All of it is public and data-independent. An algorithm declares nothing: it is tried on a tiny vector.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from dpfed.accountants import as_plan
from dpfed.algorithm import Algorithm, Round, Tree, client_round, leaves
from dpfed.data import RECORD, Federation, Footprint, generator
from dpfed.diagnostics import Observed
from dpfed.engines.simulation import Job, receipts_for
from dpfed.errors import InputError
from dpfed.flat import FlatModel, Layout, Part
from dpfed.ledger import EVERYBODY, Event, Ledger, Receipt, calibrate
from dpfed.mechanism import Gaussian, Mechanism, calibrated_sigma, round_events
from dpfed.privacy import ALL
from dpfed.recipe import Recipe

TINY = Layout((Part("tiny", (4,), "weights"), Part("tiny.lora_A", (2,), "lora_A"), Part("tiny.lora_B", (2,), "lora_B")))


class DryGradient:
    """Counts what an algorithm asks for, and always gives the same answer."""

    def __init__(self, answer: Tensor) -> None:
        self.queries: Counter[int] = Counter()
        self.noise_var, self.answer = answer.new_zeros(1), answer

    def __call__(self, theta: Tensor, *, draw: int = 0, minus: tuple[float, Tensor] | None = None, only: slice = ALL) -> Tensor:
        self.queries[draw] += 1
        return self.answer[..., only]


class Dry(NamedTuple):
    """What a client's round will be: the gradients that every step asks for, and the structure of its memory."""

    queries: list[Counter[int]]
    memory: Tree


def dry_round(algorithm: Algorithm, num_steps: int) -> Dry:
    """Run the algorithm once on a tiny vector. It declares nothing, so it can declare nothing wrongly."""
    steps = [DryGradient(torch.zeros(8)) for _ in range(num_steps)]
    s = algorithm.server_init(torch.zeros(8), TINY)
    _, memory = client_round(algorithm, s, None, steps.__getitem__, Round(0, 1.0, num_steps, TINY))
    return Dry([step.queries for step in steps], memory)


def public_fields(algorithm: Algorithm, t: Round) -> frozenset[str]:
    """The fields of the uploads of round ``t`` that stay the same, to the bit, whatever gradients and memory a client has.

    Tried from two states of the server. What is found here is released as it is: the round's own number and scale are used,
    because an algorithm may do something else in other rounds.
    """
    t = replace(t, layout=TINY)

    def steps(answer: Tensor) -> Callable[[int], DryGradient]:
        return lambda k: DryGradient(answer * (k + 1))

    theta, *answers = torch.randn(5, 8, generator=generator(0, "public"), dtype=torch.float64)
    s, same = algorithm.server_init(theta, TINY), list[set[str]]()
    for a, b in (answers[:2], answers[2:]):
        one, memory = client_round(algorithm, s, None, steps(a), t)
        other, _ = client_round(algorithm, s, memory, steps(b), t)
        fields = dict(leaves(other))
        same.append({name for name, field in leaves(one) if field.equal(fields[name])})
        s = algorithm.server_step(s, other, t)
    return frozenset(same[0] & same[1])


def blank_upload(algorithm: Algorithm, s: Tree, t: Round) -> Tree:
    """What a client without data would upload: its public fields are everybody's, the others stand for an empty sum."""
    nothing = DryGradient(torch.zeros_like(s.theta))
    return client_round(algorithm, s, None, lambda k: nothing, t)[0]


def upload_is_linear(algorithm: Algorithm) -> bool:
    """Tried, not declared: upload(a) + upload(b) = upload(a + b) + upload(0)."""
    theta, a, b = torch.randn(3, 8, generator=generator(0, "linear"), dtype=torch.float64)
    s = algorithm.server_init(theta, TINY)

    def upload(gradient: Tensor) -> Tensor:
        step = DryGradient(gradient)
        return torch.cat([x for _, x in leaves(client_round(algorithm, s, None, lambda k: step, Round(0, 1.0, 1, TINY))[0])])

    return torch.allclose(upload(a) + upload(b), upload(a + b) + upload(torch.zeros_like(a)), rtol=1e-9, atol=1e-9)


def refuse_unsound(recipe: Recipe, job: Job, dry: Dry) -> None:
    """Where a guarantee would not hold, or a switch would do nothing."""
    mechanism, name = recipe.mechanism, type(recipe.algorithm).__name__
    if recipe.cohort > (num_clients := len(job.federation.clients)):
        raise InputError(f"cohort: {recipe.cohort} clients a round were asked for, the federation has {num_clients}. Lower it.")
    if mechanism.augmentations > 1 and not job.model.needs_key:
        raise InputError(
            f"mechanism.augmentations: {mechanism.augmentations} variants of every record were asked for, but the model draws "
            "no random numbers, so they would be alike. Give it an augmentation (Task(augment=...)), or set 1."
        )
    if mechanism.noise == "local":
        return
    if [dict(step) for step in dry.queries] != [{0: 1}]:
        raise InputError(
            f"mechanism.noise: 'distributed' protects one gradient a round, but {name} with local_steps={recipe.local_steps} "
            f"takes {sum(sum(step.values()) for step in dry.queries)}. Set local_steps=1, or noise='local'."
        )
    if dry.memory is not None or not upload_is_linear(job.algorithm):
        raise InputError(
            f"mechanism.noise: 'distributed' protects only sums, but the uploads of {name} are not linear in its gradient, "
            "or it keeps a memory. Take an algorithm whose server steps, such as AdamW, SGD or AdamWBC, or noise='local'."
        )


def cohorts(recipe: Recipe, job: Job) -> list[list[int]]:
    """Who takes part in each round. Who has reached ``max_participations`` is no longer drawn, so last cohorts may be small."""
    federation, limit = job.federation, recipe.max_participations
    needed = math.ceil(recipe.rounds * recipe.cohort / len(federation.clients))
    if limit is not None and limit < needed:
        raise InputError(
            f"max_participations: {recipe.rounds} rounds of {recipe.cohort} out of {len(federation.clients)} clients need "
            f"{needed} of each, and {limit} are allowed. Raise it, or plan fewer rounds."
        )
    drawn, done, times = list[list[int]](), set[int](), Counter[int]()
    for t in range(recipe.rounds):
        drawn.append(federation.cohort(recipe.seed, t, recipe.cohort, recipe.cohort_sampling, without=done))
        times.update(drawn[-1])
        done.update(i for i in drawn[-1] if times[i] == limit)
    return drawn


def planned_events(
    mechanism: Mechanism, num_examples: int, dry: Dry, factor: float = 1.0, footprint: Footprint = RECORD
) -> Counter[Event]:
    """What one round costs a client whose ``protection`` is ``factor``."""
    return round_events(mechanism, num_examples, dry.queries, factor, footprint)


def planned_receipts(recipe: Recipe, job: Job, t: int, cohort: list[int], dry: Dry) -> list[Receipt]:
    """What round ``t`` will cost: public, and known before it happens."""
    if job.mechanism.unit == "client":
        num_clients, sigma = len(job.federation.clients), calibrated_sigma(job.mechanism)
        event = Event(recipe.cohort_sampling, recipe.cohort, num_clients, sigma, unit="client")
        return [Receipt(EVERYBODY, t, Counter([event]))]
    return receipts_for(job, t, cohort, cohort, dry.queries)


def coins(recipe: Recipe, job: Job, t: int) -> dict[int, float]:
    """What a ledger of records has to know of secret cohorts: the rate at which clients joined round ``t``."""
    secret = recipe.cohort_sampling == "poisson" and job.mechanism.unit != "client"
    return {t: recipe.cohort / len(job.federation.clients)} if secret else {}


def planned(recipe: Recipe, job: Job, drawn: list[list[int]], dry: Dry) -> Ledger:
    """What the rounds of these cohorts will cost together.

    With local noise a round costs a client the same whoever else takes part, so all of its rounds are one receipt.
    """
    plan = Ledger()
    for t in range(len(drawn)):
        plan.announce(coins(recipe, job, t))
    if job.mechanism.noise == "local" and job.mechanism.unit != "client":
        times = Counter(chain.from_iterable(drawn))
        alike: dict[int, list[int]] = {}
        for client, count in times.items():
            alike.setdefault(count, []).append(client)
        for count, clients in alike.items():
            plan.post(receipts_for(job, 0, clients, clients, dry.queries, count))
        return plan
    for t, cohort in enumerate(drawn):
        plan.post(planned_receipts(recipe, job, t, cohort, dry))
    return plan


def calibrated(recipe: Recipe, job: Job, drawn: list[list[int]], dry: Dry) -> Job:
    """The job with the target epsilon turned into the smallest sufficient sigma, for the participations that will happen."""
    mechanism = job.mechanism
    if not isinstance(mechanism, Gaussian) or mechanism.epsilon is None:
        return job
    aim, known = mechanism.epsilon, replace(mechanism, epsilon=None, sigma=1.0, calibration="worst")
    plan = planned(recipe, job._replace(mechanism=known), drawn, dry)
    if mechanism.calibration == "worst":
        return job._replace(mechanism=replace(known, sigma=calibrate(aim, recipe.delta, map(dict, plan.distinct()))))
    found = {own: calibrate(aim, recipe.delta, [dict(own)]) for own in plan.distinct()}
    sigmas = {i: found[as_plan(plan.events(i))] for i in plan.clients()}
    most = max(sigmas.values())
    factors = tuple(sigmas.get(i, most) / most for i in range(len(job.federation.clients)))
    return job._replace(mechanism=replace(known, sigma=most), factors=factors)


class Forecast(NamedTuple):
    """What is known of a run before it begins: the calibrated job, the cohorts, and how many rounds there will be.

    ``ending`` says why the run ends before the last round of its recipe, if it does.
    """

    job: Job
    cohorts: list[list[int]]
    dry: Dry
    num_rounds: int
    ending: str


def forecast(recipe: Recipe, model: FlatModel, federation: Federation) -> Forecast:
    """Check everything that can be checked, calibrate, and see how far the budget goes."""
    model.check(federation.records, federation.test, federation.test_clients)
    dry = dry_round(recipe.algorithm, recipe.local_steps)
    job = Job(model, federation, recipe.algorithm, recipe.mechanism, recipe.seed, recipe.weighting, cohort=recipe.cohort)
    refuse_unsound(recipe, job, dry)
    drawn = cohorts(recipe, job)
    job = calibrated(recipe, job, drawn, dry)
    if recipe.diagnostics and recipe.mechanism.noise == "local" and recipe.mechanism.unit != "client":
        job = job._replace(algorithm=Observed(recipe.algorithm))  # elsewhere nobody may see a single upload
    return Forecast(job, drawn, dry, *affordable(recipe, job, drawn, dry))


def affordable(recipe: Recipe, job: Job, drawn: list[list[int]], dry: Dry) -> tuple[int, str]:
    """How many of the rounds the budget pays for, and, where that is not all of them, why the run ends there."""
    budget = recipe.budget

    def cost(num_rounds: int) -> float:
        return planned(recipe, job, drawn[:num_rounds], dry).epsilon(recipe.delta)

    if budget is None or cost(recipe.rounds) <= budget:
        return recipe.rounds, ""
    low, high = 0, recipe.rounds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    if low == 0:
        raise InputError(
            f"budget: epsilon {budget:g} does not pay for one round, which costs {cost(1):.4g}. Raise it, or sigma."
        )
    return low, f"the budget of epsilon {budget:g}: one round more, and {cost(high):.4g} would be spent"
