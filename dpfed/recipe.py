"""A recipe: everything a run is made of, as one frozen value that can be printed, stored and rebuilt."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from dpfed.algorithm import Algorithm
from dpfed.data import Federation
from dpfed.engines.simulation import Simulation
from dpfed.errors import InputError
from dpfed.flat import FlatModel
from dpfed.mechanism import AsReleased, Gaussian, Plain
from dpfed.pieces import Schedule


class AnyTask(Protocol):
    def build(self, seed: int) -> tuple[FlatModel, Federation]: ...


@dataclass(frozen=True)
class Recipe:
    """One run: a task, an algorithm, a mechanism, and the federated schedule.

    Args:
        task: the model and who holds which records.
        algorithm: what clients and server compute.
        mechanism: what makes the gradients private.
        rounds: how often the server averages (T).
        local_steps: gradient steps of a client between two averages (K).
        cohort: clients that train in a round, drawn afresh every round (S).
        cohort_sampling: fixed: exactly that many; poisson: each by a coin of its own, so many in the mean, perhaps nobody.
        max_participations: rounds after which a client is no longer drawn; what is calibrated is what then remains.
        budget: the epsilon that the run may not pass; it ends before the round that would.
        seed: keys every random draw: start, partition, cohorts, batches, noise.
        delta: the probability with which epsilon may fail; well below one over the number of records.
        schedule: of the learning rate over the rounds.
        warmup: rounds in which the learning rate first rises.
        weighting: of the uploads: all alike, or by the clients' (public) numbers of records.
        evaluate_every: rounds between two looks at the test records.
        diagnostics: describe drift and moments in every row (dpfed report RUN --diagnostics shows them).
        average: what is evaluated and saved: the last model, a moving average of all (ema), or the mean of the second half
            (tail). Averages see only models that are published anyway, and cost nothing.
        average_decay: the weight of the past in the moving average.
        engine: where the clients train.
    """

    task: AnyTask
    algorithm: Algorithm
    mechanism: Gaussian | Plain | AsReleased
    rounds: int = 50
    local_steps: int = 10
    cohort: int = 5
    cohort_sampling: Literal["fixed", "poisson"] = "fixed"
    max_participations: int | None = None
    budget: float | None = None
    seed: int = 0
    delta: float = 1e-5
    schedule: Schedule = "cosine"
    warmup: int = 0
    weighting: Literal["uniform", "examples"] = "uniform"
    evaluate_every: int = 1
    diagnostics: bool = False
    average: Literal["none", "ema", "tail"] = "none"
    average_decay: float = 0.9
    engine: Simulation = field(default_factory=Simulation)

    def __post_init__(self) -> None:
        for name in ("rounds", "local_steps", "cohort", "evaluate_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.warmup <= self.rounds:
            raise InputError(f"warmup: must lie between 0 and the {self.rounds} rounds, got {self.warmup}.")
        if not 0 < self.delta < 1:
            raise InputError(f"delta: must lie between 0 and 1, got {self.delta}. 1e-5 is usual for up to 10,000 records.")
        if not 0 < self.average_decay < 1:
            raise InputError(f"average_decay: must lie between 0 and 1, got {self.average_decay}. 0.9 looks back ten rounds.")
        if self.budget is not None and not self.budget > 0:
            raise InputError(f"budget: must be an epsilon above 0, got {self.budget}. None is no limit.")
        if self.max_participations is not None and self.max_participations < 1:
            raise InputError(f"max_participations: must be at least 1, got {self.max_participations}. None is no limit.")
        _check_choices(self, "")
        self._check_secrets()

    def _check_secrets(self) -> None:
        """Where the guarantee rests on nobody knowing who takes part, or on all counting alike."""
        by_client = self.mechanism.unit == "client"
        if self.max_participations is not None and (by_client or self.cohort_sampling == "poisson"):
            raise InputError(
                "max_participations: it counts who took part, which stays secret with cohort_sampling='poisson' and with "
                "unit='client'. Leave it out, or take fixed cohorts and unit='example'."
            )
        if by_client and self.weighting != "uniform":
            raise InputError(
                "weighting: must be 'uniform' with unit='client', got 'examples'. Every upload is clipped to the same norm, so "
                "that all clients are protected alike."
            )

    @property
    def name(self) -> str:
        """The papers' name: ``DP-FedAdamW`` where the mechanism is private, ``FedAdamW`` where not."""
        name = getattr(self.algorithm, "name", type(self.algorithm).__name__)
        if isinstance(self.mechanism, AsReleased):
            return f"{name} (as released)"
        return name if isinstance(self.mechanism, Plain) else f"DP-{name}"


def _check_choices(value: Any, path: str) -> None:
    """A misspelt switch must not silently choose something else: every Literal field holds one of its choices."""
    hints = typing.get_type_hints(type(value))
    for f in dataclasses.fields(value):
        inner = getattr(value, f.name)
        if dataclasses.is_dataclass(inner):
            _check_choices(inner, f"{path}{f.name}.")
        elif typing.get_origin(hints[f.name]) is Literal and inner not in typing.get_args(hints[f.name]):
            choices = ", ".join(map(repr, typing.get_args(hints[f.name])))
            raise InputError(f"{path}{f.name}: must be one of {choices}; got {inner!r}.")


def to_json(value: Any) -> Any:
    """A value as plain JSON: a dataclass with its type and its fields; what has no plain form by its repr."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"type": f"{type(value).__module__}:{type(value).__qualname__}", **plain}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in cast(list[Any], value)]
    return {"opaque": f"{type(value).__qualname__}"}


def from_json(plain: Any) -> Any:
    """The inverse, for values made of this library's own dataclasses. Nothing else is imported or run."""
    if isinstance(plain, list):
        return tuple(map(from_json, cast(list[Any], plain)))
    if not isinstance(plain, dict):
        return plain
    fields = cast(dict[str, Any], plain)
    module, _, name = str(fields.get("type", "")).partition(":")
    if not module.startswith("dpfed.") or any("opaque" in part for part in _dicts(fields)):
        raise InputError(
            "recipe: it holds a model, data or a class of your own, which a file cannot bring back. Resume it from Python, "
            "with the same objects: dpfed.run(recipe, out='that folder', resume=True)."
        )
    try:
        kind = getattr(importlib.import_module(module), name)
        if not dataclasses.is_dataclass(kind):
            raise AttributeError(name)
        made: Any = kind
        return made(**{key: from_json(value) for key, value in fields.items() if key != "type"})
    except (ImportError, AttributeError, TypeError) as error:
        raise InputError(
            f"recipe: '{module}:{name}' cannot be rebuilt ({error}). Was the run made by another version?"
        ) from error


def _dicts(plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plain
    for value in plain.values():
        if isinstance(value, dict):
            yield from _dicts(cast(dict[str, Any], value))
