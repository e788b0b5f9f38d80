"""Your own model and your own data as a task."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dpfed.data import Federation
from dpfed.flat import Augment, Criterion, FlatModel, cross_entropy


@dataclass(frozen=True, eq=False)
class Task:
    """A torch module and a federation. ``criterion(output, target)`` is the loss of a batch.

    The module is moved to the engine's device, and its parameters are only read. The metrics (see `dpfed.metrics`) are reported
    for cross entropy. ``augment``: what records go through before they are trained on: say `dpfed.augment.pad_crop_flip(4)`.
    """

    model: nn.Module
    federation: Federation
    criterion: Criterion = cross_entropy
    augment: Augment | None = None
    metrics: tuple[str, ...] = ("accuracy",)

    def build(self, seed: int) -> tuple[FlatModel, Federation]:
        return FlatModel(self.model, self.criterion, self.augment, self.metrics), self.federation
