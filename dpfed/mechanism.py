"""Mechanisms, as values: what is done to gradients so that nobody's data can be read off them. None depends on data.

A mechanism says what is done (`dpfed.privacy` does it) and what a step of it costs (the ledger adds up).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from dpfed.data import RECORD, Drawing, Footprint, Sampling
from dpfed.errors import InputError
from dpfed.ledger import Event

Clipping = Literal["flat", "block", "automatic", "adaptive"]
Unit = Literal["example", "client", "batch"]
COUNT_SHARE = 0.01  # adaptive clipping: of 1 / sigma^2, what the count of those within the threshold costs


class Mechanism(Protocol):
    """What is done to the gradients of a batch."""

    @property
    def batch_size(self) -> int: ...
    @property
    def sampling(self) -> Drawing: ...
    @property
    def clip(self) -> float: ...
    @property
    def sigma(self) -> float | None: ...
    @property
    def noise(self) -> Literal["local", "distributed"]: ...
    @property
    def colluding(self) -> float: ...
    @property
    def clipping(self) -> Clipping: ...
    @property
    def unit(self) -> Unit: ...
    @property
    def augmentations(self) -> int: ...


@dataclass(frozen=True)
class Gaussian:
    """Clip every record's gradient to L2 norm ``clip``, add noise of standard deviation ``sigma * clip`` to the sum.

    Args:
        epsilon: what the whole run may cost; sigma is then calibrated for the client that spends most.
        sigma: the noise multiplier itself; give this or epsilon (--mechanism.epsilon None --mechanism.sigma 1).
        clip: the norm to which every record's gradient is clipped (C).
        batch_size: the expected size of a batch (B); a client with fewer records uses all of them, at rate 1.
        sampling: poisson (neighbours add or remove a record) or fixed (neighbours replace one; costs much more).
        noise: local: every upload is private by itself. distributed: every client adds only its share of the noise, and only
            the sum of a cohort is; needs secure aggregation, one local step, and an upload that is linear in the gradient.
        colluding: the part of a cohort that may tell its noise to the observer (distributed noise only).
        clipping: flat: to norm clip; block: each tensor to its part of it; automatic: to (almost) exactly clip, however small;
            adaptive: to a norm that follows a quantile of the gradients' norms and starts at clip (the count is paid for).
        quantile: the share of gradients that adaptive clipping leaves as they are.
        unit: whom it protects. example: one record. client: all records of a client at once; the upload is clipped, and a
            trusted server adds the noise to the sum (clip is then a norm of uploads, and gradients carry no noise).
        calibration: worst: one sigma, with which nobody spends more than epsilon. each: every client its own, with which it
            spends epsilon; those who take part less often or hold more records then add less noise.
        augmentations: random variants of every record, whose gradients are averaged before the clipping (De et al. 2022,
            arXiv 2204.13650): no further cost. Needs a model that draws random numbers, such as one that augments.
    """

    epsilon: float | None = None
    sigma: float | None = None
    clip: float = 1.0
    batch_size: int = 64
    sampling: Sampling = "poisson"
    noise: Literal["local", "distributed"] = "local"
    colluding: float = 0.0
    clipping: Clipping = "flat"
    quantile: float = 0.5
    unit: Literal["example", "client"] = "example"
    calibration: Literal["worst", "each"] = "worst"
    augmentations: int = 1

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.sigma is None):
            raise InputError("mechanism: give either epsilon (sigma is then calibrated) or sigma, not both and not neither.")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise InputError(f"mechanism.epsilon: must be a finite number above 0, got {self.epsilon}.")
        if self.sigma is not None and not 0 <= self.sigma < math.inf:
            raise InputError(f"mechanism.sigma: must be a finite number, 0 or above, got {self.sigma}.")
        if not self.clip > 0 or (math.isinf(self.clip) and self.sigma != 0):
            raise InputError(
                f"mechanism.clip: must be above 0, and finite where there is noise, got {self.clip}. "
                "Without a bound on every record's gradient no noise protects it; 1.0 is a good start."
            )
        if not 0 <= self.colluding < 1 or (self.colluding and self.noise == "local"):
            raise InputError(
                f"mechanism.colluding: must be at least 0 and below 1, got {self.colluding}, and 0 where noise is local: "
                "no client relies on another's noise there."
            )
        if not 0 < self.quantile < 1:
            raise InputError(f"mechanism.quantile: must lie between 0 and 1, got {self.quantile}. 0.5 is the median norm.")
        if self.clipping != "flat" and math.isinf(self.clip):
            raise InputError(
                f"mechanism.clip: must be finite for clipping={self.clipping!r}, got inf. For no clipping at all take 'flat'."
            )
        if self.calibration == "each" and (self.epsilon is None or self.noise == "distributed" or self.unit == "client"):
            raise InputError(
                "mechanism.calibration: 'each' finds every client its own sigma for one epsilon. It needs epsilon, local noise "
                "(in a shared sum all rely on the noise of all) and unit='example'. Take 'worst', or change those."
            )
        if self.unit == "client" and (self.noise == "distributed" or self.clipping == "block"):
            raise InputError(
                "mechanism.unit: for 'client' the server adds the noise to a sum of uploads that are clipped as one. That is "
                "neither noise='distributed' nor clipping='block'. Take noise='local' and another clipping."
            )
        _check_batch(self.batch_size, self.sampling, self.augmentations)
        if self.sampling not in get_args(Sampling):
            raise InputError(
                f"mechanism.sampling: {self.sampling!r} goes through the records in passes. No coin says who is in a batch, so "
                "nothing is amplified, and no accountant here covers it. Take 'poisson'; passes are for Plain."
            )


class Unprotected:
    """What the mechanisms without a guarantee have in common."""

    @property
    def noise(self) -> Literal["local"]:
        return "local"

    @property
    def colluding(self) -> float:
        return 0.0

    @property
    def clipping(self) -> Literal["flat"]:
        return "flat"


@dataclass(frozen=True)
class Plain(Unprotected):
    """No clipping and no noise: the mean gradient of the batch. The ledger says epsilon = inf.

    Args:
        batch_size: records in a batch (B).
        sampling: fixed: exactly B of them, drawn afresh in every step; shuffled: B of them, pass after pass over the client's
            records, in a new order each (local epochs); poisson: B on average.
        augmentations: random variants of every record, whose gradients are averaged.
    """

    batch_size: int = 64
    sampling: Drawing = "fixed"
    augmentations: int = 1

    def __post_init__(self) -> None:
        _check_batch(self.batch_size, self.sampling, self.augmentations)

    @property
    def clip(self) -> float:
        return math.inf

    @property
    def sigma(self) -> float:
        return 0.0

    @property
    def unit(self) -> Literal["example"]:
        return "example"


@dataclass(frozen=True)
class AsReleased(Unprotected):
    """What the released code of DP-FedAdamW does: it clips the gradient of the whole batch, tensor by tensor. Not private.

    One record can turn the mean gradient around, which moves each of the L tensors by 2C, all of them by 2C sqrt(L); the noise
    is only sigma C / B. The multiplier is sigma / (2 B sqrt(L)), below 0.01 for every model of the paper: the ledger says inf.

    Args:
        sigma: the noise is sigma * clip / batch_size on every coordinate of the mean gradient.
        clip: the norm to which every tensor of the mean gradient is clipped (C).
        batch_size: records in a batch (B), drawn at fixed size.
    """

    sigma: float = 1.0
    clip: float = 0.1
    batch_size: int = 16

    def __post_init__(self) -> None:
        if not (0 <= self.sigma < math.inf and 0 < self.clip < math.inf):
            raise InputError(f"mechanism: sigma {self.sigma} and clip {self.clip} must be finite, and clip above 0.")
        _check_batch(self.batch_size, self.sampling, self.augmentations)

    @property
    def sampling(self) -> Literal["fixed"]:
        return "fixed"

    @property
    def unit(self) -> Literal["batch"]:
        return "batch"

    @property
    def augmentations(self) -> int:
        return 1


def _check_batch(batch_size: int, sampling: str, augmentations: int) -> None:
    if batch_size < 1:
        raise InputError(f"mechanism.batch_size: must be at least 1, got {batch_size}.")
    if sampling not in get_args(Drawing):
        raise InputError(f"mechanism.sampling: must be one of {', '.join(map(repr, get_args(Drawing)))}; got {sampling!r}.")
    if augmentations < 1:
        raise InputError(f"mechanism.augmentations: must be at least 1, got {augmentations}. 1 is every record once.")


def charged_sampling(mechanism: Mechanism) -> Sampling:
    """As what its batches are charged; those that are shuffled as of fixed size, without noise."""
    return "poisson" if mechanism.sampling == "poisson" else "fixed"


def expected_size(mechanism: Mechanism, num_examples: int) -> int:
    """The public divisor: the expected batch size of a client, never the realised one."""
    return min(mechanism.batch_size, num_examples)


def protection(mechanism: Mechanism, cohort: Sequence[tuple[float, int]]) -> list[float]:
    """What stands between the observer and a record of each client of a cohort, as a multiple of sigma.

    ``cohort``: every client's weight in the mean and its expected batch size. Local noise protects each client with all of
    sigma. With distributed noise client j contributes  w_j / B_j (sum of clipped + sigma C / sqrt(S) N(0, I)),  so the sum has
    the noise of all, and a record of client i moves it by  w_i / B_i C.  Those who collude are taken to be the noisiest others.

    >>> protection(Gaussian(sigma=1.0, noise="distributed"), [(0.25, 8)] * 4)
    [1.0, 1.0, 1.0, 1.0]
    >>> protection(Gaussian(sigma=1.0, noise="distributed", colluding=0.5), [(0.25, 8)] * 2)
    [0.7071067811865476, 0.7071067811865476]
    """
    if mechanism.noise == "local":
        return [1.0] * len(cohort)
    parts, num_colluding = [weight / size for weight, size in cohort], math.floor(mechanism.colluding * len(cohort))
    rising, num_honest = sorted(parts), len(parts) - num_colluding
    least, rest = (math.fsum(part**2 for part in rising[:count]) for count in (num_honest, num_honest - 1))
    bound = rising[num_honest - 1]  # a client of at most this is among the quietest itself
    own = {part: math.sqrt((least if part <= bound else rest + part**2) / len(parts)) / part for part in set(parts)}
    return [own[part] for part in parts]


def events(
    mechanism: Mechanism, num_examples: int, queries: Mapping[int, int], factor: float = 1.0, footprint: Footprint = RECORD
) -> Counter[Event]:
    """What one local step costs a client: one event a batch, at sigma / sqrt(number of gradients taken on that batch).

    ``factor`` is the client's ``protection``, ``footprint`` the federation's. Where clients are the unit, a step costs nothing:
    the round does.
    """
    if mechanism.unit == "client":
        return Counter()
    sigma, size, sampling = factor * calibrated_sigma(mechanism), mechanism.batch_size, charged_sampling(mechanism)
    seen = "open" if mechanism.noise == "local" else "secure"
    if mechanism.unit == "batch" or mechanism.sampling == "shuffled":
        sigma = 0.0
    sigmas = (sigma / math.sqrt(count) for count in queries.values())
    return Counter(Event(sampling, size, num_examples, own, seen, mechanism.unit, *footprint) for own in sigmas)


def round_events(
    mechanism: Mechanism,
    num_examples: int,
    queries: Iterable[Mapping[int, int]],
    factor: float = 1.0,
    footprint: Footprint = RECORD,
) -> Counter[Event]:
    """What the local steps with these queries cost a client together."""
    total = Counter[Event]()
    for step, times in Counter(tuple(step.items()) for step in queries).items():
        for event, count in events(mechanism, num_examples, dict(step), factor, footprint).items():
            total[event] += times * count
    return total


def calibrated_sigma(mechanism: Mechanism) -> float:
    if mechanism.sigma is None:
        raise InputError("mechanism.sigma: not calibrated yet; dpfed.run does it. Give sigma instead of epsilon.")
    return mechanism.sigma


def reach(clipping: Clipping, clip: float) -> float:
    """How far one unit moves what is released: the clip; under adaptive clipping with the count beside the sum.

    >>> reach("flat", 2.0), round(reach("adaptive", 2.0), 4)
    (2.0, 2.0101)
    """
    return clip / math.sqrt(1 - COUNT_SHARE) if clipping == "adaptive" else clip


def count_weight(clip: float) -> float:
    """Adaptive clipping: the count, times this, is one coordinate more of the sum. One unit moves it by half of that.

    >>> round(math.hypot(2.0, count_weight(2.0) / 2), 4) == round(reach("adaptive", 2.0), 4)
    True
    """
    return 2 * clip * math.sqrt(COUNT_SHARE / (1 - COUNT_SHARE))
