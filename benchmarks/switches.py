"""What the switches of the mechanism and of the recipe give on the packaged task: the table of docs/mechanisms.md.

    python -m benchmarks.switches            # about three minutes on one core

Accuracy in percent after the catalogue's rounds, mean of the seeds 0 and 1 and each of them.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from typing import Any

from dpfed import Recipe, catalogue, run

BOTH = ("FedAvg", "FedAdamW")
PRIVATE, RELEASED = "fashion/DP-{}", "fashion/as-released/{}"

# Methods, the recipe, and which of its fields are changed.
ROWS: list[tuple[tuple[str, ...], str, dict[str, Any]]] = [
    (BOTH, PRIVATE, {}),
    (BOTH, PRIVATE, {"mechanism.clipping": "block"}),
    (BOTH, PRIVATE, {"mechanism.clipping": "automatic"}),
    (BOTH, PRIVATE, {"mechanism.clipping": "adaptive"}),
    (("FedAdamW",), PRIVATE, {"mechanism.clip": 10.0}),
    (("FedAdamW",), PRIVATE, {"mechanism.clip": 10.0, "mechanism.clipping": "adaptive"}),
    (BOTH, PRIVATE, {"mechanism.calibration": "each"}),
    (("FedAvg",), PRIVATE, {"max_participations": 15}),
    (BOTH, PRIVATE, {"average": "ema"}),
    (BOTH, PRIVATE, {"average": "tail"}),
    (("FedAvg",), PRIVATE, {"schedule": "constant"}),
    (("FedAvg",), PRIVATE, {"schedule": "constant", "average": "ema"}),
    (("FedAvg",), PRIVATE, {"schedule": "constant", "average": "tail"}),
    (("FedAvg",), PRIVATE, {"task.pad": 1}),
    (("FedAvg",), PRIVATE, {"task.pad": 1, "mechanism.augmentations": 4}),
    (("FedAvg",), PRIVATE, {"task.model": "mlp"}),
    (("FedAvg",), PRIVATE, {"task.model": "mlp", "task.pad": 1, "mechanism.augmentations": 4}),
    (BOTH, RELEASED, {}),
]


def changed(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    for name, value in fields.items():
        part, _, inner = name.rpartition(".")
        now = dataclasses.replace(getattr(recipe, part), **{inner: value}) if part else value
        recipe = dataclasses.replace(recipe, **{part or inner: now})
    return recipe


def accuracy(recipe: Recipe) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return 100 * run(dataclasses.replace(recipe, evaluate_every=recipe.rounds), f"{folder}/run").rows[-1]["accuracy"]


def main() -> None:
    for methods, name, fields in ROWS:
        for method in methods:
            recipe = changed(catalogue.named_recipe(name.format(method)), fields)
            seeds = [accuracy(dataclasses.replace(recipe, seed=seed)) for seed in (0, 1)]
            switches = ", ".join(f"{field}={value}" for field, value in fields.items()) or "nothing changed"
            print(f"{recipe.name:24} {switches:56} {sum(seeds) / 2:5.1f}  {seeds[0]:5.1f} {seeds[1]:5.1f}", flush=True)


if __name__ == "__main__":
    main()
