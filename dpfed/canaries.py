"""The world in which an attack takes place: clients who hold canaries, and somebody who listens to all that is released.

A canary is a record whose gradient is known, and far above the clipping norm. The model is linear in its parameters, so a
record has the same gradient wherever they are. All else is the real thing: algorithm, mechanism, noise, batches, ledger, round
loop.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpfed.algorithm import Algorithm, Gradient, Round, Tree, leaves
from dpfed.data import RECORD, Federation, Footprint, Sampling
from dpfed.engines.simulation import Engine, Job, Simulation
from dpfed.flat import FlatModel, Layout, Records
from dpfed.forecast import DryGradient, forecast, planned
from dpfed.ledger import Ledger
from dpfed.mechanism import AsReleased, Gaussian, Plain, calibrated_sigma, charged_sampling, count_weight, reach
from dpfed.recipe import Recipe
from dpfed.rounds import begin
from dpfed.tasks.custom import Task

NUM_COORDINATES = 8
LOUD = 1e4  # the canary's gradient over the clipping norm: where clipping works, it does not matter how loud it is
OTHERS = 10.0  # the same of those that it replaces

Opened = Callable[[Job], Engine]
Key = tuple[int, ...]  # round, step, draw, query
Name = tuple[int, str]  # round, field


class Target(NamedTuple):
    """Who is attacked: its mechanism, how many records it has, how often it takes part, and with how many others."""

    mechanism: Gaussian | Plain | AsReleased
    sampling: Sampling
    num_examples: int
    rounds: int
    footprint: Footprint
    num_clients: int

    @property
    def rate(self) -> float:
        return min(1.0, self.mechanism.batch_size / self.num_examples)

    @property
    def scale(self) -> float:
        return self.mechanism.clip if math.isfinite(self.mechanism.clip) else 1.0

    @property
    def count_is_heard(self) -> bool:
        """Adaptive clipping counts a record without a gradient, but not one that is absent. At rate 1 the `_quiet` canary makes
        up for that; elsewhere the attacker does not listen to the count."""
        plain = self.mechanism.unit == "example" and self.sampling == "poisson" and self.footprint == RECORD
        return plain and self.mechanism.clipping == "adaptive" and self.rate == 1


def worst_client(recipe: Recipe) -> Target:
    """The client that the recipe charges most. A common factor of its batch and its records is left out: the rate remains."""
    plan = forecast(recipe, *recipe.task.build(recipe.seed))
    mechanism, federation, drawn = recipe.mechanism, plan.job.federation, plan.cohorts[: plan.num_rounds]
    if mechanism.unit == "client":
        mechanism = replace(mechanism, epsilon=None, sigma=calibrated_sigma(plan.job.mechanism), batch_size=1)
        return Target(mechanism, recipe.cohort_sampling, 1, plan.num_rounds, RECORD, len(federation.clients))
    prices = planned(recipe, plan.job, drawn, plan.dry).epsilons(recipe.delta)
    worst = max(prices, key=prices.__getitem__)
    num_examples = federation.sizes[worst]
    if isinstance(mechanism, Gaussian):
        sigma = calibrated_sigma(plan.job.mechanism) * (plan.job.factors[worst] if plan.job.factors else 1.0)
        mechanism = replace(mechanism, epsilon=None, sigma=sigma, calibration="worst")
        if federation.footprint == RECORD and mechanism.batch_size < num_examples:
            common = math.gcd(mechanism.batch_size, num_examples)
            mechanism, num_examples = replace(mechanism, batch_size=mechanism.batch_size // common), num_examples // common
    num_rounds = sum(worst in cohort for cohort in drawn)
    return Target(mechanism, charged_sampling(mechanism), num_examples, num_rounds, federation.footprint, recipe.cohort)


def two_worlds(target: Target, loud: float) -> tuple[Tensor, Tensor]:
    """``[n, d]`` twice: the gradients of a client's records without the canary, and with it.

    Neighbours are those of the mechanism: a canary that is there or not, beside records without a gradient; or one that
    replaces a record that pulls the other way, as all others do. What reads the canary's owner changes with it.
    """
    owned, readers = target.footprint
    direction = torch.full((NUM_COORDINATES,), NUM_COORDINATES**-0.5, dtype=torch.float64)
    canary, opposite = loud * target.scale * direction, -OTHERS * target.scale * direction
    other = torch.zeros_like(canary) if target.sampling == "poisson" else opposite
    absent = other.repeat(target.num_examples, 1)
    present = absent.clone()
    present[: owned + readers] = canary
    absent[owned : owned + readers] = opposite
    if target.count_is_heard:
        absent[0] = _quiet(target.scale) * direction
    return absent, present


def _quiet(clip: float) -> float:
    """The norm of a gradient that, counted as within the threshold, is as far from the canary as one that is absent."""
    return clip - math.sqrt(reach("adaptive", clip) ** 2 - count_weight(clip) ** 2)


class Canaries(nn.Module):
    """The gradient of a record x is x |x|, so that a finite record may have one that is not. Up to four tensors."""

    def __init__(self, num_coordinates: int) -> None:
        super().__init__()
        pieces = torch.zeros(num_coordinates, dtype=torch.float64).tensor_split(min(4, num_coordinates))
        self.pieces = nn.ParameterList(nn.Parameter(piece.clone()) for piece in pieces)

    def forward(self, x: Tensor) -> Tensor:
        return (x * x.abs()) @ torch.cat(list(self.pieces))


def _of_output(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def _as_it_is(record: Records, key: Tensor) -> Records:
    return record


@dataclass(frozen=True)
class Alone:
    """A task without data: a method by itself is attacked. Records may have variants, which are all alike.

    Args:
        num_examples: records of every client; the batch size over it is the sampling rate.
        num_clients: all clients; the cohort is drawn from them.
    """

    num_examples: int = 16
    num_clients: int = 1

    def build(self, seed: int) -> tuple[FlatModel, Federation]:
        holdings = _federation(torch.zeros(self.num_clients, self.num_examples, NUM_COORDINATES))
        return FlatModel(Canaries(NUM_COORDINATES), _of_output, _as_it_is), holdings


def _federation(gradients: Tensor, footprint: Footprint = RECORD) -> Federation:
    """``[clients, n, d]``: who holds records with these gradients."""
    roots = gradients.double().sign() * gradients.double().abs().sqrt().clamp(max=1e200)
    rows = torch.arange(gradients[..., 0].numel())
    return Federation(
        {"x": roots.flatten(0, 1), "y": torch.zeros(len(rows))}, rows.split(gradients.shape[1]), footprint=footprint
    )


def trained(
    recipe: Recipe,
    target: Target,
    gradients: Tensor,
    rounds: int,
    *,
    cohort: int,
    forgets: bool = False,
    sampling: Sampling = "fixed",
    engine: Opened | None = None,
) -> tuple[Overheard, Ledger]:
    """``[clients, n, d]``: the recipe's round loop over clients with these gradients; what is heard, and what is charged."""
    augment = _as_it_is if target.mechanism.augmentations > 1 else None
    model = Canaries(gradients.shape[-1])
    ear = Overheard(recipe.algorithm, Layout.of(model), forgets)
    changed = Recipe(
        Task(model, _federation(gradients, target.footprint), _of_output, augment),
        ear,
        target.mechanism,
        rounds,
        recipe.local_steps,
        cohort,
        sampling,
        seed=recipe.seed,
        delta=recipe.delta,
        schedule="constant",
        evaluate_every=rounds,
        engine=Simulation("cpu"),
    )
    with tempfile.TemporaryDirectory() as folder:
        record, rows = begin(changed, f"{folder}/run", engine=engine)
        ear.on = True
        for _ in rows:
            pass
        return ear, record.ledger


@dataclass
class Overheard:
    """An algorithm with an ear at it. Nothing is changed, but that the server begins every round with its first state (it may
    send what it likes, and so the trials are independent), and that clients remember nothing where that is asked for."""

    algorithm: Algorithm
    layout: Layout
    forgets: bool
    on: bool = field(default=False, init=False)
    num_rows: int = field(default=1, init=False)
    gradients: dict[Key, list[Tensor]] = field(default_factory=dict[Key, list[Tensor]], init=False)
    counts: dict[Key, list[Tensor]] = field(default_factory=dict[Key, list[Tensor]], init=False)
    uploads: dict[Name, list[Tensor]] = field(default_factory=dict[Name, list[Tensor]], init=False)
    means: dict[Name, list[Tensor]] = field(default_factory=dict[Name, list[Tensor]], init=False)

    def server_init(self, theta: Tensor, layout: Layout) -> Tree:
        return self.algorithm.server_init(theta, layout)

    def client_init(self, s: Tree, memory: Tree, t: Round) -> Tree:
        return self.algorithm.client_init(s, memory, t)

    def local_step(self, x: Tree, s: Tree, grad: Gradient, t: Round, k: int) -> Tree:
        real = self.on and not isinstance(grad, DryGradient)
        return self.algorithm.local_step(x, s, Tap(grad, self, (t.index, k)) if real else grad, t, k)

    def upload(self, x: Tree, s: Tree, memory: Tree, t: Round) -> tuple[Tree, Tree]:
        upload, memory = self.algorithm.upload(x, s, memory, t)
        for name, vector in leaves(upload) if self.on else ():
            self.uploads.setdefault((t.index, name), []).append(vector.expand(self.num_rows, vector.shape[-1]))
        return upload, None if self.forgets else memory

    def server_step(self, s: Tree, u: Tree, t: Round) -> Tree:
        if not self.on or t.layout != self.layout:
            return self.algorithm.server_step(s, u, t)
        self.means |= {(t.index, name): [vector] for name, vector in leaves(u)}
        return s


class Tap:
    """A private gradient that is passed on, and written down."""

    def __init__(self, private: Any, ear: Overheard, place: Key) -> None:
        self.private, self.noise_var, self._ear, self._place = private, private.noise_var, ear, place
        self._calls: Counter[int] = Counter()

    def __call__(self, theta: Tensor, *, draw: int = 0, **asked: Any) -> Tensor:
        released = self.private(theta, draw=draw, **asked)
        key = (*self._place, draw, self._calls[draw])
        self._calls[draw] += 1
        self._ear.num_rows = len(released)
        self._ear.gradients.setdefault(key, []).append(released.double())
        self._ear.counts.setdefault(key, []).append(self.private.within.double())
        return released
