"""Fashion-MNIST, small: real photographs of clothes, 14 x 14 grey pixels, ten classes. It ships inside the package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from torch import nn

from dpfed.augment import pad_crop_flip
from dpfed.data import Federation, dirichlet, generator
from dpfed.flat import FlatModel, Records
from dpfed.metrics import needs_shares


@dataclass(frozen=True)
class FashionMini:
    """20,000 training and 2,000 test pictures in a Dirichlet federation.

    Args:
        num_clients: who share the training pictures.
        alpha: how unlike their label proportions are: 0.1 very, 100 hardly.
        model: a softmax regression, or one hidden layer.
        hidden: width of the hidden layer.
        pad: train on pictures that are moved by up to so many pixels and mirrored, afresh each time; 0 is as they are.
        metrics: what the rows say about the test pictures: accuracy, macro_accuracy, matthews, worst_client_accuracy.
    """

    num_clients: int = 20
    alpha: float = 0.3
    model: Literal["linear", "mlp"] = "linear"
    hidden: int = 64
    pad: int = 0
    metrics: tuple[str, ...] = ("accuracy",)

    def build(self, seed: int) -> tuple[FlatModel, Federation]:
        with files("dpfed.tasks").joinpath("fashion_mini.npz").open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            train, test = _records(stored["train_x"], stored["train_y"]), _records(stored["test_x"], stored["test_y"])
        federation = dirichlet(train, self.num_clients, alpha=self.alpha, seed=seed, test=test)
        pixels = train["x"].shape[1]
        if self.model == "linear":
            module = nn.Sequential(nn.Linear(pixels, 10))
        else:
            module = nn.Sequential(nn.Linear(pixels, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 10))
        start(module, seed)
        augment = pad_crop_flip(self.pad, shape=(1, 14, 14)) if self.pad else None
        judged = federation.deal_test(seed) if needs_shares(self.metrics) else federation
        return FlatModel(module, augment=augment, metrics=self.metrics), judged


def start(module: nn.Module, seed: int) -> None:
    """Keyed initial weights for linear layers: uniform as in torch, zero for the output layer's."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    random = generator(seed, "theta0")
    for layer in layers:
        bound = 0.0 if layer is layers[-1] else layer.in_features**-0.5
        nn.init.uniform_(layer.weight, -bound, bound, generator=random)
        nn.init.zeros_(layer.bias)


def _records(images: np.ndarray, labels: np.ndarray) -> Records:
    pixels = torch.from_numpy(images).flatten(1).float() / 255
    return {"x": (pixels - 0.286) / 0.33, "y": torch.from_numpy(labels).long()}
