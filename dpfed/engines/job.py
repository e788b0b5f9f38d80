"""What is trained, on what and how: all that clients need to know of a run besides the server's state."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dpfed.algorithm import Algorithm
from dpfed.data import Federation
from dpfed.flat import FlatModel
from dpfed.mechanism import Mechanism


class Job(NamedTuple):
    """``seed``: what batches and noise are keyed by in a simulation. None in a deployment: secret then, never repeated.
    ``factors``: what sigma is multiplied by for every client of the federation; none: 1.
    ``cohort``: the expected size of a cohort, by which uploads are divided where clients are the unit.
    """

    model: FlatModel
    federation: Federation
    algorithm: Algorithm
    mechanism: Mechanism
    seed: int | None
    weighting: Literal["uniform", "examples"] = "uniform"
    factors: tuple[float, ...] = ()
    cohort: int = 1
