"""How well a classifier does: functions of its confusion matrix, counts ``[classes, classes]`` by (truth, prediction).

The matrix is all that has to be counted on the device, so a test of any size needs one look at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpfed.errors import InputError

CLIENT_METRICS = ("worst_client_accuracy", "client_accuracy")
"""What needs every client's own share of the test records."""


def confusion(target: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Counts as float64.

    >>> confusion(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2)
    tensor([[1., 1.],
            [0., 1.]], dtype=torch.float64)
    """
    pairs = target * num_classes + predicted
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes).double()


def accuracy(counts: Tensor) -> Tensor:
    """The part of the records that is right."""
    return counts.trace() / counts.sum()


def macro_accuracy(counts: Tensor) -> Tensor:
    """The mean over the classes (those that occur) of the part of their records that is right: balanced accuracy."""
    sizes = counts.sum(1)
    return (counts.diagonal() / sizes)[sizes > 0].mean()


def f1(counts: Tensor) -> Tensor:
    """Of class 1, for two classes: 2 TP / (2 TP + FP + FN); 0 where there is nothing to divide by."""
    positives = counts[1].sum() + counts[:, 1].sum()
    return torch.where(positives > 0, 2 * counts[1, 1] / positives, 0.0)


def matthews(counts: Tensor) -> Tensor:
    """Matthews' correlation (Gorodkin's for more than two classes); 0 where truth or prediction is constant."""
    truth, said, total = counts.sum(1), counts.sum(0), counts.sum()
    together = total * counts.trace() - truth @ said
    apart = (total**2 - said @ said) * (total**2 - truth @ truth)
    return torch.where(apart > 0, together / apart.clamp(min=1).sqrt(), 0.0)


METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "accuracy": accuracy,
    "macro_accuracy": macro_accuracy,
    "f1": f1,
    "matthews": matthews,
}


def client_accuracies(right: Tensor, shares: Sequence[Tensor]) -> Tensor:
    """The accuracy on every client's own share of the test records; NaN for a client that has none."""
    owner = torch.cat([torch.full_like(rows, i) for i, rows in enumerate(shares)]).to(right.device)
    counted = right[torch.cat(tuple(shares)).to(right.device)].double()
    sums = torch.zeros(len(shares), dtype=torch.float64, device=right.device).index_add(0, owner, counted)
    return sums / torch.bincount(owner, minlength=len(shares))


def needs_shares(metrics: Sequence[str]) -> bool:
    """Whether a federation has to have test records for every client (`Federation.deal_test`)."""
    return not set(CLIENT_METRICS).isdisjoint(metrics)


def judged(
    metrics: Sequence[str], target: Tensor, predicted: Tensor, num_classes: int, shares: Sequence[Tensor] | None
) -> dict[str, Tensor]:
    """The metrics of some predictions, by name, still on their device."""
    counts = confusion(target, predicted, num_classes)
    found = {name: METRICS[name](counts) for name in metrics if name in METRICS}
    if shares is not None and needs_shares(metrics):
        of_clients = client_accuracies(predicted == target, shares)
        by_name = {"client_accuracy": of_clients, "worst_client_accuracy": of_clients.nan_to_num(2).min()}
        found |= {name: value for name, value in by_name.items() if name in metrics}
    return found


def check_metrics(metrics: Sequence[str]) -> None:
    known = (*METRICS, *CLIENT_METRICS)
    if isinstance(metrics, str) or not set(metrics) <= set(known):
        raise InputError(f"metrics: must be a tuple of names out of {', '.join(known)}; got {metrics!r}.")


def check_judging(metrics: Sequence[str], num_classes: int, shares: Sequence[Tensor] | None) -> None:
    if "f1" in metrics and num_classes != 2:
        raise InputError(f"metrics: 'f1' is for two classes, the model has {num_classes}. Take 'macro_accuracy' instead.")
    if shares is None and needs_shares(metrics):
        raise InputError(
            f"metrics: {' and '.join(CLIENT_METRICS)} need a share of the test records for every client. Give the federation "
            "one with federation.deal_test()."
        )
