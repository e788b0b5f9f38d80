"""Empirical lower bounds on epsilon: the running code is attacked, and what the attack finds out is turned into a number.

An accountant bounds epsilon from above, for the mechanism that is written on paper. An audit bounds it from below, for the one
that runs. When the second number is above the first, the code does not do what it is charged for.

``audit`` repeats a training with and without one canary: a record with a gradient far above the clipping norm, in a direction
that the attacker knows. Each simulated client is one repetition, with coins and noise of its own, so hundreds of repetitions
are one matrix of the real engine. The attacker is the server, and hears every released gradient and every upload. One half of
the repetitions teaches it which score and which threshold to use; only the other half, which it never saw, is counted.

Formal guarantee. If the mechanism is (epsilon, delta)-DP, every test has  TPR <= e^epsilon FPR + delta  and
1 - FPR <= e^epsilon (1 - TPR) + delta.  The two rates get exact one-sided Clopper-Pearson bounds, each at the root of the
confidence (the two samples are independent), so that both hold together with at least the confidence.

- ``method="exact"`` solves these two for epsilon, and assumes nothing about the mechanism. With n repetitions it can never
  see more than about log(n / 10), and not much of it.
- ``method="events"`` takes the charged events at their word, except for their noise: it asks up to which noise they could have
  produced such rates, at every delta at once, and states the epsilon of that noise. One event at rate 1 makes it the mu of
  Gaussian differential privacy. It refutes the claim exactly when the rates are impossible under the charged events, which is
  as rigorous as the first; as a number it is a lower bound among mechanisms of the charged kind.

``audit_one_run`` needs a single run: m canaries, each put in by a fair coin, and the attacker guesses the coins (Steinke, Nasr
and Jagielski, NeurIPS 2023, arXiv:2305.08846). It holds for any mechanism, however the canaries influence one another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor, nn

from dpfed import data
from dpfed.algorithm import Algorithm, Gradient, Round, Tree, leaves
from dpfed.data import Federation
from dpfed.engines.simulation import Job, train_clients
from dpfed.errors import InputError
from dpfed.flat import FlatModel, Layout
from dpfed.ledger import Event, calibrate, epsilon
from dpfed.privacy import Gaussian, expected_size
from dpfed.rounds import dry_round, planned_events

Method = Literal["exact", "events"]
Array = np.ndarray[Any, np.dtype[Any]]

LOUD = 100.0  # the canary's gradient over the clipping norm: where clipping works, it does not matter how loud it is
NUM_COORDINATES = 8
AT_ONCE = 1000  # clients in one matrix


@dataclass(frozen=True)
class Audit:
    """What an attack proved, beside what was claimed. ``evidence`` is what it saw."""

    claimed: float
    lower_bound: float
    confidence: float
    delta: float
    method: str
    num_trials: int
    evidence: str

    @property
    def passed(self) -> bool:
        """Nothing was found against the claim. (That is no proof of it: another attack may find more.)"""
        return self.lower_bound <= self.claimed

    def report(self) -> str:
        verdict = (
            f"passed. The attack proves at least {self.lower_bound:.3f} of the {self.claimed:.3f} that are claimed."
            if self.passed
            else f"FAILED. {self.claimed:.3f} is claimed, the attack proves at least {self.lower_bound:.3f}."
        )
        return f"""\
Audit of epsilon at delta = {self.delta:g}: {verdict}
  Confidence: a correct mechanism fails in at most {100 * (1 - self.confidence):.3g} % of all audits.
  Method: {self.method}.
  Evidence: {self.evidence}, in {self.num_trials} trials."""


# The audit of many repetitions


def audit(
    algorithm: Algorithm,
    mechanism: Gaussian,
    *,
    rounds: int = 1,
    local_steps: int = 1,
    num_examples: int = 16,
    num_copies: int = 1,
    num_trials: int = 4000,
    method: Method = "events",
    delta: float = 1e-5,
    confidence: float = 0.999,
    seed: int = 0,
) -> Audit:
    """Train ``num_trials`` clients, half of them with the canary, and tell the two halves apart.

    Args:
        algorithm: anything with the five methods; the server repeats its first state, for it may send what it likes.
        mechanism: with an epsilon, it is calibrated for the training of this audit; with a sigma, it is taken as it is.
        num_examples: records of a client; the batch size over it is the sampling rate.
        num_copies: rows that belong to the canary: more than 1 shows what augmented copies, counted as records, cost.
        method: exact assumes nothing about the mechanism; events only doubts the noise of the charged events.
    """
    if num_trials < 40 or num_trials % 4:
        raise InputError(f"num_trials: must be a multiple of 4, at least 40, got {num_trials}. 4000 is a good start.")
    if not 1 <= num_copies <= num_examples:
        raise InputError(f"num_copies: must lie between 1 and the {num_examples} records of a client, got {num_copies}.")
    _check_confidence(confidence)
    mechanism = _calibrated(algorithm, mechanism, rounds, local_steps, num_examples, delta)
    direction = torch.full((NUM_COORDINATES,), NUM_COORDINATES**-0.5, dtype=torch.float64)
    canary = LOUD * mechanism.clip * direction
    blank = torch.zeros_like(canary) if mechanism.sampling == "poisson" else -canary
    records = blank.repeat(num_trials, num_examples, 1)
    records[1::2, :num_copies] = canary
    job = _job(algorithm, mechanism, records, seed)
    num_others = 0 if mechanism.sampling == "poisson" else expected_size(mechanism, num_examples)
    shift = 1 if mechanism.sampling == "poisson" else 2
    attack = _Attack(direction, -num_others, shift, min(1.0, mechanism.batch_size / num_examples))
    heard: list[Array] = []
    charged: set[frozenset[tuple[Event, int]]] = set()
    for start in range(0, num_trials, AT_ONCE):
        clients = list(range(start, min(start + AT_ONCE, num_trials)))
        log, spent = _overheard(job, clients, rounds, local_steps)
        heard.append(_features(log, job, attack))
        charged |= {frozenset(events.items()) for events in spent}
    (events,) = (Counter(dict(plan)) for plan in charged)
    features = np.concatenate(heard)
    judged = _judge(features[0::2], features[1::2], method, delta, math.sqrt(confidence))
    claimed = epsilon(events, delta)
    if method == "exact":
        bound = float(_exact_bound(judged.false_rate, judged.true_rate, delta))
        how = "exact: Clopper-Pearson bounds on the rates of a white-box attack, whatever the mechanism"
    else:
        bound = _events_bound(judged.false_rate, judged.true_rate, events, delta)
        how = "events: Clopper-Pearson bounds on the rates of a white-box attack, for the charged events at another noise"
    return Audit(claimed, bound, confidence, delta, how, num_trials, judged.evidence)


class _Attack(NamedTuple):
    """What the attacker knows: the canary's direction, what the others sum up to along it, what it changes, its rate."""

    direction: Tensor
    offset: float
    shift: float
    rate: float


class _Judged(NamedTuple):
    """Of the half that was not learnt from: the false alarms bounded from above, the true ones from below."""

    false_rate: float
    true_rate: float
    evidence: str


def _features(log: _Log, job: Job, attack: _Attack) -> Array:
    """``[S, features]``: the log-likelihood ratio of all that was released, and every vector along the canary, by tensor."""
    sizes, d = job.model.layout.sizes, len(attack.direction)
    size, clip = expected_size(job.mechanism, job.federation.sizes[0]), job.mechanism.clip
    ratio = torch.zeros(len(log.uploads[0]), dtype=torch.float64)
    columns: list[Tensor] = []

    def along(vectors: Tensor) -> Tensor:
        """``[S, tensors]``"""
        pieces = (vectors * attack.direction).split(sizes, dim=-1)
        return torch.stack([piece.sum(-1) for piece in pieces], dim=-1)

    for batches in log.gradients:
        for gradients in batches.values():
            columns += (along(g) for g in gradients)
            mean = torch.stack(gradients).mean(0) @ attack.direction * size / clip
            noise = job.mechanism.sigma / math.sqrt(len(gradients)) if job.mechanism.sigma else math.inf
            ratio = ratio + log_likelihood_ratio(mean - attack.offset, attack.rate, noise, attack.shift)
    together = torch.stack(columns).sum(0)
    for uploads in log.uploads:
        for vectors in zip(*(dict(leaves(upload)).values() for upload in uploads), strict=True):
            leaf = torch.stack(vectors).double()
            columns += [leaf.mean(-1, keepdim=True)] + ([along(leaf)] if leaf.shape[-1] == d else [])
    found = torch.cat([ratio.unsqueeze(-1), together, *columns], dim=-1)
    return found.nan_to_num(0.0, 1e30, -1e30).clamp(-1e30, 1e30).numpy()


def log_likelihood_ratio(z: Tensor, rate: float, sigma: float, shift: float = 1.0) -> Tensor:
    """Of one release along the canary, in units of C:  log((1 - q) N(0, sigma^2) + q N(shift, sigma^2)) - log N(0, sigma^2)."""
    tilt = (shift * z - shift**2 / 2) / sigma**2
    absent = math.log1p(-rate) if rate < 1 else -math.inf
    return torch.logaddexp(torch.full_like(tilt, absent), math.log(rate) + tilt)


def _judge(absent: Array, present: Array, method: Method, delta: float, level: float) -> _Judged:
    """Learn a score and a threshold from the first half of either sample; count on the other."""
    learn, judge = (slice(0, len(absent) // 2), slice(len(absent) // 2, None))
    score, threshold = _learn(absent[learn], present[learn], method, delta, level)
    false, true = (int((sample[judge] @ score > threshold).sum()) for sample in (absent, present))
    num = len(absent) - len(absent) // 2
    words = f"{false} of {num} false alarms and {true} of {num} true ones"
    return _Judged(float(at_most(false, num, level)), float(at_least(true, num, level)), words)


def _learn(absent: Array, present: Array, method: Method, delta: float, level: float) -> tuple[Array, float]:
    """The linear score and the threshold that would prove most on the data they are learnt from."""
    best, found = -math.inf, (np.zeros(absent.shape[1]), math.inf)
    for score in _scores(absent, present):
        below, above = np.sort(absent @ score), np.sort(present @ score)
        thresholds = np.unique(np.quantile(np.concatenate([below, above]), np.linspace(0, 1, 201)))
        false = at_most(len(below) - np.searchsorted(below, thresholds, side="right"), len(below), level)
        true = at_least(len(above) - np.searchsorted(above, thresholds, side="right"), len(above), level)
        worth = _exact_bound(false, true, delta) if method == "exact" else special.ndtri(true) - special.ndtri(false)
        worth = np.nan_to_num(worth, nan=-math.inf)
        if worth.max() > best:
            best, found = worth.max(), (score, float(thresholds[worth.argmax()]))
    return found


def _scores(absent: Array, present: Array) -> Iterator[Array]:
    """Every feature by itself, up and down, and Fisher's discriminant of them all."""
    num_features = absent.shape[1]
    scale = np.concatenate([absent, present]).std(axis=0)
    scale[scale == 0] = 1
    spread = np.cov(((absent - absent.mean(0)) / scale).T) + np.cov(((present - present.mean(0)) / scale).T)
    step = (present.mean(0) - absent.mean(0)) / scale
    yield np.linalg.solve(np.atleast_2d(spread) + 1e-6 * np.eye(num_features), step) / scale
    for direction in np.eye(num_features):
        yield direction
        yield -direction


def at_most(count: Any, num: int, level: float) -> Any:
    """Clopper-Pearson from above: the rate is at most this, with probability ``level`` or more."""
    return np.where(
        np.less(count, num), special.betaincinv(np.add(count, 1), np.maximum(np.subtract(num, count), 1), level), 1.0
    )


def at_least(count: Any, num: int, level: float) -> Any:
    """Clopper-Pearson from below.

    >>> round(float(at_least(0, 10, 0.95)), 4), round(float(at_least(10, 10, 0.95)), 4)
    (0.0, 0.7411)
    """
    return 1 - at_most(np.subtract(num, count), num, level)


def _exact_bound(false: Any, true: Any, delta: float) -> Any:
    """The least epsilon with which a test may have these rates, for the canary put in and for the canary taken out."""
    floor = 1e-300
    put_in = np.log(np.maximum(np.subtract(true, delta), floor)) - np.log(np.maximum(false, floor))
    taken_out = np.log(np.maximum(1 - np.add(false, delta), floor)) - np.log(np.maximum(np.subtract(1, true), floor))
    return np.maximum(np.maximum(put_in, taken_out), 0.0)


DELTAS = tuple(np.concatenate([10.0 ** np.arange(-6, -1), np.linspace(0.02, 0.98, 25)]).tolist())


def _events_bound(false: float, true: float, events: Counter[Event], delta: float) -> float:
    """Epsilon of the charged events, at the most noise with which they could have had these rates (to 1 %)."""

    def scaled(factor: float) -> Counter[Event]:
        return Counter({replace(event, sigma=event.sigma * factor): count for event, count in events.items()})

    def impossible(factor: float) -> bool:
        profile = ((epsilon(scaled(factor), d), d) for d in DELTAS)
        return any(bool(_exact_bound(false, true, d) > spent) for spent, d in profile)

    refuted = impossible(1.0)
    high, low = (1.0, 0.5) if refuted else (2.0, 1.0)  # at `high` the rates are impossible, at `low` they are not
    while refuted and impossible(low):
        high, low = low, low / 2
    while not refuted and not impossible(high):
        high, low = 2 * high, high
        if high > 100:
            return 0.0
    while high / low > 1.01:
        middle = math.sqrt(high * low)
        high, low = (middle, low) if impossible(middle) else (high, middle)
    return epsilon(scaled(high), delta)


# The audit of one run


def audit_one_run(
    algorithm: Algorithm,
    mechanism: Gaussian,
    *,
    rounds: int = 1,
    local_steps: int = 1,
    num_examples: int = 64,
    num_canaries: int = 4096,
    delta: float = 1e-5,
    confidence: float = 0.999,
    seed: int = 0,
) -> Audit:
    """One run of clients who hold nothing but canaries, each there by a fair coin; the attacker guesses the coins.

    Canary j of a client points along coordinate j. The attacker says "in" to the highest scores and "out" to the lowest, and
    nothing about the rest. How many guesses are best is not known beforehand: four numbers are tried, each at a quarter of
    the error probability.
    """
    num_clients, rest = divmod(num_canaries, num_examples)
    if rest or not num_clients or num_examples < 2:
        raise InputError(
            f"num_canaries: must be a multiple of the {num_examples} (at least 2) records of a client, got {num_canaries}."
        )
    _check_confidence(confidence)
    mechanism = _calibrated(algorithm, mechanism, rounds, local_steps, num_examples, delta)
    coins = torch.rand(num_clients, num_examples, generator=data.generator(seed, "audit coins"), dtype=torch.float64) < 0.5
    sign = torch.where(coins, 1.0, 0.0 if mechanism.sampling == "poisson" else -1.0).double()
    job = _job(algorithm, mechanism, LOUD * mechanism.clip * torch.diag_embed(sign), seed)
    log, spent = _overheard(job, list(range(num_clients)), rounds, local_steps)
    score, rate = torch.zeros_like(sign), min(1.0, mechanism.batch_size / num_examples)
    for batches in log.gradients:
        for gradients in batches.values():
            z = torch.stack(gradients).mean(0) * expected_size(mechanism, num_examples) / mechanism.clip
            noise = mechanism.sigma / math.sqrt(len(gradients)) if mechanism.sigma else math.inf
            score = score + log_likelihood_ratio(z, rate, noise)
            if mechanism.sampling == "fixed":
                score = score - log_likelihood_ratio(-z, rate, noise)
    guessed = coins.flatten()[score.flatten().argsort()].numpy()
    proofs: list[tuple[float, str]] = []
    for num_each in sorted({max(1, num_canaries // share) for share in (40, 10, 4, 2)}):
        correct = int((~guessed[:num_each]).sum() + guessed[-num_each:].sum())
        bound = one_run_bound(correct, 2 * num_each, num_canaries, delta, 1 - (1 - confidence) / 4)
        proofs.append((bound, f"{correct} of {2 * num_each} guesses right, about {num_canaries} canaries of one run"))
    bound, evidence = max(proofs)
    claimed = max(epsilon(events, delta) for events in spent)
    how = "one run: canaries by fair coins, the bound of Steinke, Nasr and Jagielski (2023)"
    return Audit(claimed, bound, confidence, delta, how, num_canaries, evidence)


def one_run_p_value(num_correct: int, num_guesses: int, num_canaries: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if the mechanism is (epsilon, delta)-DP: Theorem 5.2 of the paper.

    With delta = 0 nobody guesses better than randomised response does: Binomial(r, e^epsilon / (1 + e^epsilon)). Delta adds
    2 m delta times the steepest climb of that distribution below the count, max_i P[v > Binomial >= v - i] / i.
    """
    binomial: Any = stats.binom(num_guesses, special.expit(epsilon))
    below = np.cumsum(binomial.pmf(np.arange(num_correct - 1, -1, -1)))
    climb = float((below / np.arange(1, num_correct + 1)).max(initial=0.0))
    return min(1.0, float(binomial.sf(num_correct - 1)) + 2 * num_canaries * delta * climb)


def one_run_bound(num_correct: int, num_guesses: int, num_canaries: int, delta: float, confidence: float) -> float:
    """The least epsilon at which so many right guesses are not too unlikely.

    >>> round(one_run_bound(75, 100, 1000, 1e-4, 0.95), 3)  # the paper's example, appendix D
    0.673
    """
    if not 0 <= num_correct <= num_guesses <= num_canaries:
        raise InputError(f"num_correct: {num_correct} of {num_guesses} guesses about {num_canaries} canaries cannot be.")

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(num_correct, num_guesses, num_canaries, epsilon, delta) < 1 - confidence

    low, high = 0.0, 1.0
    if not refuted(low):
        return 0.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


# The world in which an attack takes place


class Canaries(nn.Module):
    """Its output is the inner product with the record, so that every record is its own gradient. Two tensors."""

    def __init__(self, num_coordinates: int) -> None:
        super().__init__()
        half = num_coordinates // 2
        self.first = nn.Parameter(torch.zeros(half, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(num_coordinates - half, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.first, self.second])


def _of_output(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def _job(algorithm: Algorithm, mechanism: Gaussian, records: Tensor, seed: int) -> Job:
    """``[clients, records, d]``: the records, which are the gradients."""
    num_clients, num_examples, d = records.shape
    pool = {"x": records.flatten(0, 1), "y": torch.zeros(num_clients * num_examples)}
    federation = Federation(pool, tuple(torch.arange(num_clients * num_examples).view(num_clients, -1)))
    return Job(FlatModel(Canaries(d), _of_output), federation, algorithm, mechanism, seed)


def _calibrated(
    algorithm: Algorithm, mechanism: Gaussian, rounds: int, local_steps: int, num_examples: int, delta: float
) -> Gaussian:
    if mechanism.epsilon is not None:
        unit, dry = replace(mechanism, epsilon=None, sigma=1.0), dry_round(algorithm, local_steps)
        once = planned_events(unit, num_examples, dry)
        plan = Counter({event: count * rounds for event, count in once.items()})
        return replace(unit, sigma=calibrate(mechanism.epsilon, delta, [plan]))
    if not mechanism.sigma:
        raise InputError("mechanism.sigma: is 0, so nothing is claimed that an audit could refute. Give it noise.")
    return mechanism


class _Log(NamedTuple):
    """All that the server could have heard: the gradients of every step by batch, and the uploads of every round."""

    gradients: list[dict[int, list[Tensor]]]
    uploads: list[list[Tree]]


class _Tap:
    """A private gradient that is passed on, and written down."""

    def __init__(self, private: Gradient, heard: dict[int, list[Tensor]]) -> None:
        self.private, self.noise_var, self._heard = private, private.noise_var, heard

    def __call__(self, theta: Tensor, *, draw: int = 0, minus: tuple[float, Tensor] | None = None) -> Tensor:
        released = self.private(theta, draw=draw, minus=minus)
        self._heard.setdefault(draw, []).append(released.double())
        return released


@dataclass(frozen=True)
class _Listening:
    """An algorithm, overheard: what it is given by its gradients is noted, and nothing is changed."""

    algorithm: Algorithm
    heard: list[dict[int, list[Tensor]]] = field(default_factory=list[dict[int, list[Tensor]]])

    def server_init(self, theta: Tensor, layout: Layout) -> Any:
        return self.algorithm.server_init(theta, layout)

    def client_init(self, s: Any, memory: Any, t: Round) -> Any:
        return self.algorithm.client_init(s, memory, t)

    def local_step(self, x: Any, s: Any, grad: Gradient, t: Round, k: int) -> Any:
        self.heard.append({})
        return self.algorithm.local_step(x, s, _Tap(grad, self.heard[-1]), t, k)

    def upload(self, x: Any, s: Any, memory: Any, t: Round) -> tuple[Any, Any]:
        return self.algorithm.upload(x, s, memory, t)

    def server_step(self, s: Any, u: Any, t: Round) -> Any:
        return self.algorithm.server_step(s, u, t)


def _overheard(job: Job, clients: list[int], rounds: int, local_steps: int) -> tuple[_Log, list[Counter[Event]]]:
    """Train the clients, and write down what is released; and what each of them was charged."""
    listening = _Listening(job.algorithm)
    layout, memory, uploads = job.model.layout, dict[int, Tree](), list[list[Tree]]()
    spent = {i: Counter[Event]() for i in clients}
    s = job.algorithm.server_init(job.model.theta0(), layout)
    for index in range(rounds):
        t = Round(index, 1.0, local_steps, layout)
        sent, kept, receipts = train_clients(job._replace(algorithm=listening), t, s, clients, memory)
        memory |= kept
        uploads.append(sent)
        for receipt in receipts:
            spent[receipt.client].update(receipt.events)
    return _Log(listening.heard, uploads), list(spent.values())


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise InputError(f"confidence: must lie between 0 and 1, got {confidence}. 0.999 raises one false alarm in 1000.")
