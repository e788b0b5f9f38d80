"""Who holds what, as a picture: a bubble for every client and label, its area the number of records, and the sizes above."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np

from dpfed.data import Federation
from dpfed.errors import InputError
from dpfed.report import COLOURS, METADATA, MUTED, STYLE

MOST_BUBBLES = 60_000


def federation_figure(federation: Federation, path: str | Path) -> Path:
    """Clients from left to right: how many records each holds, and of which labels. PNG, SVG or PDF."""
    path, counts = Path(path), federation.label_counts().numpy()
    if path.suffix not in METADATA:
        raise InputError(f"figure: ends in {', '.join(METADATA)}, got {path.name!r}. Change the ending.")
    if counts.size > MOST_BUBBLES:
        raise InputError(f"figure: {counts.shape[0]} clients x {counts.shape[1]} labels are too many to be seen. Draw fewer.")
    num_clients, num_labels = counts.shape
    with import_module("matplotlib").rc_context(STYLE):
        page = import_module("matplotlib.figure").Figure(
            figsize=(min(4 + 0.15 * num_clients, 11), min(3 + 0.2 * num_labels, 9)), layout="constrained"
        )
        sizes, labels = page.subplots(2, 1, sharex=True, height_ratios=(1, max(1.0, min(0.25 * num_labels, 4))))
        sizes.bar(range(num_clients), federation.sizes, color=COLOURS[0], width=0.8)
        sizes.set(title="Records of each client", ylim=(0, None))
        sizes.set_axisbelow(True)
        client, label = np.nonzero(counts)
        step = labels.get_window_extent().width / page.dpi * 72 / num_clients  # points between two clients
        area = np.clip(step, 3, 14) ** 2 * counts[client, label] / counts.max()
        labels.scatter(client, label, s=area, color=COLOURS[0], linewidth=0)
        labels.set(title="Labels they hold", xlabel="client", ylabel="label", xlim=(-0.7, num_clients - 0.3))
        labels.set_ylim(-0.7, num_labels - 0.3)
        names = federation.records["y"].unique().tolist()
        every = -(-num_labels // 25)
        labels.set_yticks(range(0, num_labels, every), [str(name) for name in names[::every]])
        labels.xaxis.set_major_locator(import_module("matplotlib.ticker").MaxNLocator(10, integer=True))
        labels.tick_params(colors=MUTED)
        try:
            page.savefig(path, metadata=METADATA[path.suffix])
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}). Name another place for it.") from error
    return path
