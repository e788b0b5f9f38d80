"""Who holds what, as a picture: a bubble for every client and label, its area the number of records, and the sizes above."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.data import Federation
from dpfed.errors import InputError
from dpfed.report import COLOURS, METADATA, STYLE

MOST_BUBBLES = 60_000


def federation_figure(federation: Federation, path: str | Path) -> Path:
    """Clients from left to right: how many records each holds and, where targets are labels, of which. PNG, SVG or PDF."""
    path, counts = Path(path), federation.label_counts()
    if path.suffix not in METADATA:
        raise InputError(f"figure: ends in {', '.join(METADATA)}, got {path.name!r}. Change the ending.")
    if counts is not None and counts.numel() > MOST_BUBBLES:
        raise InputError(
            f"figure: {len(counts)} clients x {counts.shape[1]} labels are too many to be seen. Draw fewer clients."
        )
    num_clients, num_labels = len(federation.clients), 0 if counts is None else counts.shape[1]
    with import_module("matplotlib").rc_context(STYLE):
        page = import_module("matplotlib.figure").Figure(
            figsize=(min(4 + 0.15 * num_clients, 11), min(3 + 0.2 * num_labels, 9)), layout="constrained"
        )
        heights = (1,) if counts is None else (1, max(1.0, min(0.25 * num_labels, 4)))
        sizes, *below = page.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
        sizes.bar(range(num_clients), federation.sizes, color=COLOURS[0], width=0.8)
        sizes.set(title="Records of each client", ylim=(0, None), xlim=(-0.7, num_clients - 0.3), xlabel="client")
        sizes.xaxis.set_major_locator(import_module("matplotlib.ticker").MaxNLocator(10, integer=True))
        if counts is not None:
            sizes.set(xlabel="")
            _bubbles(below[0], counts.numpy(), [str(name) for name in federation.records["y"].unique().tolist()])
        try:
            page.savefig(path, metadata=METADATA[path.suffix])
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}). Name another place for it.") from error
    return path


def _bubbles(axes: Any, counts: np.ndarray, names: list[str]) -> None:
    client, label = np.nonzero(counts)
    width = axes.get_window_extent().width / axes.figure.dpi * 72 / len(counts)  # points between two clients
    area = np.clip(width, 3, 14) ** 2 * counts[client, label] / counts.max()
    axes.scatter(client, label, s=area, color=COLOURS[0], linewidth=0)
    axes.set(title="Labels they hold", xlabel="client", ylabel="label", ylim=(-0.7, len(names) - 0.3))
    every = -(-len(names) // 25)
    axes.set_yticks(range(0, len(names), every), names[::every])
