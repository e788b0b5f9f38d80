"""Your own model and your own data as a task."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dpfed.data import Federation
from dpfed.flat import Criterion, FlatModel, cross_entropy


@dataclass(frozen=True, eq=False)
class Task:
    """A torch module and a federation. ``criterion(output, target)`` is the loss of a batch; accuracy is reported for the default."""

    model: nn.Module
    federation: Federation
    criterion: Criterion = cross_entropy

    def build(self, seed: int) -> tuple[FlatModel, Federation]:
        return FlatModel(self.model, self.criterion), self.federation
