"""Empirical lower bounds on epsilon: the running code is attacked, and what the attack finds out is turned into a number.

An accountant bounds epsilon from above, for the mechanism that is written on paper. An audit bounds it from below, for the one
that runs. When the second number is above the first, the code does not do what it is charged for.

``audit`` attacks the client that a recipe charges most: canaries stand in the place of its data (`dpfed.canaries`), half of the
trials have one, and the attacker tells the halves apart (`dpfed.evidence` makes a bound of that). It is one of two observers:

- Where noise is local, every client of one cohort is a trial. The server hears every released gradient and every upload of
  every client, over all the rounds and steps in which the recipe's worst client takes part.
- Where only sums are private (distributed noise, clients as the unit), or another engine trains: every round is a trial, and
  what is heard is the mean that the server is given; less what is known of those who collude.

``audit_one_run`` needs a single run: many canaries, each put in by a fair coin, and the attacker guesses the coins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpfed import data, evidence
from dpfed.canaries import LOUD, Opened, Overheard, Target, trained, two_worlds, worst_client
from dpfed.data import RECORD
from dpfed.errors import InputError
from dpfed.evidence import Array
from dpfed.ledger import EVERYBODY, Event, Ledger, epsilon
from dpfed.mechanism import expected_size
from dpfed.recipe import Recipe

Kinds = list[list[Tensor]]  # of every kind of release, one after another, each a row a trial
SMALL, LARGE, FEW = 1e-300, 1e30, 8


@dataclass(frozen=True)
class Audit:
    """What an attack proved, beside what was claimed.

    ``exact`` assumes nothing of the mechanism; ``lower_bound`` is usually larger, and takes the charged events at their word,
    except for their noise. Both hold together with the confidence. ``claimed`` is the epsilon of what was attacked.
    """

    claimed: float
    lower_bound: float
    exact: float
    confidence: float
    delta: float
    num_trials: int
    attacked: str
    evidence: str

    @property
    def passed(self) -> bool:
        """Nothing was found against the claim. (That is no proof of it: another attack may find more.)"""
        return max(self.lower_bound, self.exact) <= self.claimed

    def report(self) -> str:
        verdict = "Passed: nothing was found against the claim" if self.passed else "REFUTED: more is lost than is claimed"
        bound = f"epsilon > {self.exact:.4f} for any mechanism at all"
        if self.lower_bound > self.exact:
            bound = (
                f"epsilon > {self.lower_bound:.4f} for the charged events at any noise, > {self.exact:.4f} for all mechanisms"
            )
        return f"""\
{verdict}.
  Claimed      epsilon = {self.claimed:.4f} at delta = {self.delta:g}
  Lower bound  {bound}
  Confidence   {100 * self.confidence:.6g} %: of correct runs, at most one in {1 / (1 - self.confidence):,.0f} is refuted
  Attacked     {self.attacked}
  Evidence     {self.evidence}; {self.num_trials} trials"""


def audit(
    recipe: Recipe,
    *,
    num_trials: int = 4000,
    confidence: float = 0.999,
    loud: float = LOUD,
    engine: Opened | None = None,
) -> Audit:
    """Attack what the recipe does to its worst client, with and without a canary, and compare with what it charges.

    Args:
        num_trials: half of them with the canary. More trials prove more.
        confidence: with which all that is found holds together.
        loud: the norm of the canary's gradient over the clipping norm; inf is a gradient that is not finite.
        engine: another engine than the simulation; a round of a cohort of one is then a trial.
    """
    if num_trials < 40 or num_trials % 4:
        raise InputError(f"num_trials: must be a multiple of 4, at least 40, got {num_trials}. 4000 is a good start.")
    _check_confidence(confidence)
    target = worst_client(recipe)
    mechanism, error, delta = target.mechanism, (1 - confidence) / 2, recipe.delta
    by_round = engine is not None or mechanism.noise == "distributed" or mechanism.unit == "client"
    num_rounds = 1 if by_round or mechanism.clipping == "adaptive" else target.rounds  # adaptive: all share the next threshold
    if by_round and mechanism.clipping == "adaptive":
        raise InputError(
            "mechanism.clipping: 'adaptive' moves the threshold from round to round, so rounds are no independent trials. "
            "Audit it with local noise and records as the unit, or take another clipping."
        )
    if by_round:
        absent, events = _rounds(recipe, target, num_trials // 2, False, loud, engine)
        present, _ = _rounds(recipe, target, num_trials // 2, True, loud, engine)
    else:
        features, events = _clients(recipe, target, num_rounds, num_trials, loud)
        absent, present = features[0::2], features[1::2]
    exact = evidence.judged(absent, present, lambda f, t: evidence.exact_bound(f, t, delta), error)
    apart = evidence.judged(absent, present, evidence.distance, error)
    claimed, proved = epsilon(events, delta), float(evidence.exact_bound(exact.false, exact.true, delta))
    bound = evidence.charged_bound(apart.false, apart.true, events, delta) if claimed < math.inf else proved
    who = "the mean that the server is given" if by_round else "every gradient and upload of a client"
    attacked = f"{who}, {_setting(recipe, target, num_rounds)}"
    return Audit(claimed, bound, proved, confidence, delta, num_trials, attacked, f"{apart.words}, and {exact.words}")


def audit_one_run(recipe: Recipe, *, num_canaries: int = 4096, confidence: float = 0.999, loud: float = LOUD) -> Audit:
    """One run of clients who hold nothing but canaries, each there by a fair coin; the attacker guesses half of the coins.

    Canary j of a client points along coordinate j. A client has as many as it has records; the coins are drawn for whole
    clients, so there may be a few more than were asked for.
    """
    _check_confidence(confidence)
    target = worst_client(recipe)
    mechanism, n = target.mechanism, target.num_examples
    if mechanism.noise == "distributed" or mechanism.unit != "example" or target.footprint != RECORD or n < 2:
        raise InputError(
            "mechanism: an audit of one run needs local noise, records as the unit and several of them at a client. "
            "dpfed.audit.audit(recipe) attacks anything, in many trials."
        )
    coins = torch.rand(math.ceil(num_canaries / n), n, generator=data.generator(recipe.seed, "audit coins")) < 0.5
    gradients = torch.diag_embed(torch.where(coins, loud, 0.0 if target.sampling == "poisson" else -loud).double())
    num_rounds = 1 if mechanism.clipping == "adaptive" else target.rounds
    ear, ledger = trained(recipe, target, gradients * target.scale, num_rounds, cohort=len(coins))
    kinds = [kind for kind in _kinds(ear) if kind[0].shape == coins.shape]
    columns = [torch.stack(kind).sum(0) for kind in kinds] + [_ratio(ear, target, lambda z: z, 1.0)]
    if target.sampling == "fixed":
        columns[-1] = columns[-1] - _ratio(ear, target, torch.neg, 1.0)
    features = _numbers(torch.stack(columns, dim=-1).flatten(0, 1))
    bound, words = evidence.guessed(coins.flatten().numpy(), features, recipe.delta, 1 - confidence)
    attacked = f"one run of {len(coins)} clients with {n} canaries each, {_setting(recipe, target, num_rounds)}"
    claimed = epsilon(ledger.events(0), recipe.delta)
    return Audit(claimed, bound, bound, confidence, recipe.delta, coins.numel(), attacked, words)


def _setting(recipe: Recipe, target: Target, num_rounds: int) -> str:
    m, steps = target.mechanism, recipe.local_steps
    return (
        f"{recipe.name}: {num_rounds} of {target.rounds} rounds of {steps} steps, {m.sampling} batches of {m.batch_size} from "
        f"{target.num_examples}, unit {m.unit}, clipping {m.clipping}, noise {m.noise}, sigma {m.sigma or 0:.4g}"
    )


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InputError(f"confidence: must lie between 0 and 1, got {confidence}. 0.999 raises one false alarm in 1000.")


# The two observers


def _clients(recipe: Recipe, target: Target, rounds: int, num_trials: int, loud: float) -> tuple[Array, Counter[Event]]:
    """Every client is a trial; every second one has the canary."""
    gradients = torch.stack(two_worlds(target, loud)).repeat(num_trials // 2, 1, 1)
    ear, ledger = trained(recipe, target, gradients, rounds, cohort=num_trials)
    kinds = _kinds(ear)
    if target.count_is_heard:
        kinds.append([torch.cat(chunks) for chunks in ear.counts.values()])
    others = 0 if target.sampling == "poisson" else expected_size(target.mechanism, target.num_examples)

    def along(sums: Tensor) -> Tensor:
        return sums.sum(-1, keepdim=True) / sums.shape[-1] ** 0.5 + others

    ratio = _ratio(ear, target, along, 1.0 if others == 0 else 2.0)
    return _features(kinds, [ratio], ear.layout.sizes), ledger.events(0)


def _rounds(
    recipe: Recipe, target: Target, num_trials: int, there: bool, loud: float, engine: Opened | None
) -> tuple[Array, Counter[Event]]:
    """Every round is a trial; the first client may have the canary."""
    mechanism, (absent, present) = target.mechanism, two_worlds(target, loud)
    drawn = mechanism.unit == "client"
    size = target.num_clients if drawn or mechanism.noise == "distributed" else 1
    gradients = absent.repeat(size, 1, 1)
    gradients[0] = present if there else absent
    company: dict[str, Any] = {"cohort": recipe.cohort, "sampling": recipe.cohort_sampling} if drawn else {"cohort": size}
    recipe = replace(recipe, seed=2 * recipe.seed + there)
    ear, ledger = trained(recipe, target, gradients, num_trials, forgets=True, engine=engine, **company)
    told = slice(size - math.floor(mechanism.colluding * size), None)
    kinds: dict[str, list[Tensor]] = {}
    for (t, name), [mean] in ear.means.items():
        known = torch.cat(ear.uploads[t, name])[told].sum(0) / size if mechanism.colluding else 0.0
        kinds.setdefault(name, []).append(mean.double() - known)
    return _features([[torch.stack(kind)] for kind in kinds.values()], [], ear.layout.sizes), _first(ledger)


def _first(ledger: Ledger) -> Counter[Event]:
    """What the first round cost the first client, or everybody."""
    [events] = [receipt.events for receipt in ledger if receipt.t == 0 and receipt.client in (0, EVERYBODY)]
    return events


# What there is to tell trials apart


def _kinds(ear: Overheard) -> Kinds:
    """The gradients by draw and query, and the fields of uploads, each over steps and rounds."""
    kinds: dict[Any, list[Tensor]] = {}
    for (_, _, *call), chunks in ear.gradients.items():
        kinds.setdefault(tuple(call), []).append(torch.cat(chunks))
    for (_, name), chunks in ear.uploads.items():
        kinds.setdefault(name, []).append(torch.cat(chunks).double())
    return list(kinds.values())


def _features(kinds: Kinds, columns: list[Tensor], sizes: list[int]) -> Array:
    """``[trials, features]``: of every kind how far it goes along the canary, by tensor and in all; its length, for noise that
    depends on data; how much two releases that follow one another differ, for noise that is used twice; a few by themselves."""
    for kind in kinds:
        whole = torch.stack(kind)
        along = whole.sum(-1, keepdim=True)
        if whole.shape[-1] == sum(sizes):
            along = torch.cat([along, *(piece.sum(-1, keepdim=True) for piece in whole.split(sizes, dim=-1))], dim=-1)
        columns = [*columns, along.sum(0), (whole.square().mean((0, -1)) + SMALL).log().unsqueeze(-1)]
        if len(kind) > 1:
            columns += [along.diff(dim=0).abs().amax(0), *(along if len(kind) <= FEW else ())]
    return _numbers(torch.cat(columns, dim=-1))


def _numbers(features: Tensor) -> Array:
    return features.nan_to_num(LARGE, LARGE, -LARGE).clamp(-LARGE, LARGE).numpy()


def _ratio(ear: Overheard, target: Target, along: Callable[[Tensor], Tensor], shift: float) -> Tensor:
    """The log-likelihood ratio of all released gradients, if their noise is what was charged: there is no better score.

    ``along`` gives the clipped sum along the canaries, in units of C: 0 without a canary, ``shift`` with it.
    """
    mechanism, batches = target.mechanism, dict[Any, list[Tensor]]()
    size, sigma = expected_size(mechanism, target.num_examples), mechanism.sigma or math.inf
    for (t, k, draw, _), chunks in ear.gradients.items():
        batches.setdefault((t, k, draw), []).append(along(torch.cat(chunks) * size / target.scale))
    ratios = (log_likelihood_ratio(torch.stack(z).mean(0), target.rate, sigma / len(z) ** 0.5, shift) for z in batches.values())
    return torch.stack(list(ratios)).sum(0)


def log_likelihood_ratio(z: Tensor, rate: float, sigma: float, shift: float = 1.0) -> Tensor:
    """Of one release along the canary:  log((1 - q) N(0, sigma^2) + q N(shift, sigma^2)) - log N(0, sigma^2)."""
    tilt = (shift * z - shift**2 / 2) / sigma**2
    absent = math.log1p(-rate) if rate < 1 else -math.inf
    return torch.logaddexp(torch.full_like(tilt, absent), math.log(rate) + tilt)
