"""Every algorithm equals an independent float64 loop, written from the specification, to 1e-12 over three rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dpfed import FedAdamW, FedAvg, LocalAdamW
from tests.paper import twins
from tests.paper.world import MECHANISMS, assert_equal, job, trained, world

LR = 0.02

FED_ADAMW: list[dict[str, Any]] = [
    {},
    {"aggregate": "none"},
    {"aggregate": "m"},
    {"aggregate": "mv"},
    {"bias_correction": False},
    {"gamma": 0.0},
    {"gamma": 1.0},
    {"align": "convex"},
    {"blocks": "none"},
    {"blocks": "tensor"},
    {"blocks": "neuron"},
    {"v_bias_correction": "local"},
    {"v_mode": "block"},
    {"decay": "coupled", "weight_decay": 0.1},
    {"floor_abs": 1e-3, "floor_rel": 0.0},
    {"aggregate": "none", "bias_correction": False, "gamma": 0.0},
]


@pytest.fixture(params=MECHANISMS)
def mechanism(request: pytest.FixtureRequest) -> Any:
    return MECHANISMS[request.param]


@pytest.mark.parametrize("switches", FED_ADAMW, ids=str)
def test_fed_adamw(mechanism: Any, switches: dict[str, Any]) -> None:
    algorithm = FedAdamW(lr=LR, **{"weight_decay": 0.1, "beta2": 0.9, **switches})
    work = job(algorithm, mechanism)
    blocks = block_of_coordinate(algorithm.blocks)
    settings = {name: getattr(algorithm, name) for name in ("gamma", "align", "aggregate", "bias_correction", "decay")}
    settings |= {name: getattr(algorithm, name) for name in ("floor_abs", "floor_rel", "v_bias_correction", "v_mode")}
    twin = twins.fed_adamw(world(work), lr=LR, blocks=blocks, weight_decay=0.1, beta2=0.9, **settings)
    assert_equal(trained(work), twin)


def block_of_coordinate(rule: str) -> np.ndarray:
    """By hand for the little attention: qkv weight [12, 4] and bias [12] in 3 x 2 heads of 2 rows; proj [3, 4] and [3]."""
    if rule == "none":
        return np.arange(75)
    if rule == "tensor":
        return np.repeat([0, 1, 2, 3], [48, 12, 12, 3])
    if rule == "neuron":
        return np.concatenate([np.arange(12).repeat(4), np.full(12, 12), 13 + np.arange(3).repeat(4), np.full(3, 16)])
    return np.concatenate([np.arange(6).repeat(8), 6 + np.arange(6).repeat(2), np.full(15, 12)])


def test_fed_avg(mechanism: Any) -> None:
    work = job(FedAvg(lr=LR, weight_decay=0.1, server_lr=0.7), mechanism)
    assert_equal(trained(work), twins.fed_avg(world(work), lr=LR, weight_decay=0.1, server_lr=0.7))


def test_local_adamw(mechanism: Any) -> None:
    work = job(LocalAdamW(lr=LR, weight_decay=0.1, beta2=0.9), mechanism)
    assert_equal(trained(work), twins.local_adamw(world(work), lr=LR, weight_decay=0.1, beta2=0.9))


def test_all_switches_off_is_local_adamw_bit_for_bit(mechanism: Any) -> None:
    off = FedAdamW(lr=LR, aggregate="none", bias_correction=False, gamma=0.0)
    one, other = trained(job(off, mechanism)), trained(job(LocalAdamW(lr=LR), mechanism))
    assert all(a.theta.equal(b.theta) for a, b in zip(one, other, strict=True))
