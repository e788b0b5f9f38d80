"""Bugs, each really planted into the running code: a gradient that does something else, another price, another server.

A bug of gradients is a function of the library's own `PrivateGradient`, which ``Buggy`` holds in three forms, and stands in its
place in the engine. The others change a name that the engine or the round loop looks up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dpfed import FedAdamW, Gaussian, Plain, Scaffold, forecast, mechanism, rounds
from dpfed.algorithm import Gradient, Round
from dpfed.algorithms import fed_adamw, scaffold
from dpfed.engines import simulation
from dpfed.ledger import Event
from dpfed.pieces import push

TENSORS = 4  # of the model in which the canaries live; two coordinates each
KEPT: dict[str, Any] = {}  # what a bug remembers, until the process ends


class Buggy:
    """``correct`` is the library's gradient, ``bare`` the same without noise, ``raw`` without clipping, too.

    ``std`` is the noise that is due on the clipped sum.
    """

    def __init__(self, made: Any, bug: Bug, *given: Any, **setting: Any) -> None:
        loss, batch, self.noise, self.sizes, self.mechanism, *rest = given
        plain = Plain(self.mechanism.batch_size, self.mechanism.sampling)
        self.bug, self.batch, self.queries = bug, batch, Counter[int]()
        self.with_mechanism: Callable[[Any], Any] = lambda other: made(loss, batch, silent, self.sizes, other, *rest, **setting)
        self.correct, self.bare, self.raw = (
            made(*given, **setting),
            self.with_mechanism(self.mechanism),
            self.with_mechanism(plain),
        )
        self.noise_var, self.within = self.correct.noise_var, torch.zeros_like(self.sizes)
        self.std = self.noise_var.sqrt() * self.sizes

    def __call__(self, theta: Tensor, *, draw: int = 0, **asked: Any) -> Tensor:
        query = self.queries[draw]
        self.queries[draw] += 1
        return self.bug(self, theta, draw, query)

    def noised(self, total: Tensor, std: Tensor | float, draw: int, query: int) -> Tensor:
        return self.noise(total, std, draw, query) / self.sizes


Bug = Callable[[Buggy, Tensor, int, int], Tensor]
Plant = Callable[[pytest.MonkeyPatch], None]


def silent(total: Tensor, std: Tensor | float, draw: int, query: int) -> Tensor:
    return total


def gradients(bug: Bug) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        made = simulation.PrivateGradient
        patch.setattr(simulation, "PrivateGradient", lambda *given, **setting: Buggy(made, bug, *given, **setting))
        KEPT.clear()

    return plant


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shrunk(x: Tensor, clip: float) -> Tensor:
    return x * (clip / torch.linalg.vector_norm(x, dim=-1, keepdim=True)).clamp(max=1)


# Of gradients


def nothing_wrong(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    return g.correct(theta, draw=draw)


def batch_mean_is_clipped(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    return g.noised(g.sizes * shrunk(g.raw(theta, draw=draw), g.mechanism.clip), g.std, draw, query)


def tensors_are_clipped_to_the_whole_clip(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    by_tensor = replace(g.mechanism, clipping="block", clip=g.mechanism.clip * math.sqrt(TENSORS))
    return g.noised(g.sizes * g.with_mechanism(by_tensor)(theta, draw=draw), g.std, draw, query)


def noise_is_divided_twice(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    return g.noised(g.sizes * g.bare(theta, draw=draw), g.std / g.sizes, draw, query)


def noise_is_not_divided(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    return g.noised(g.sizes * g.bare(theta, draw=draw), g.std * g.sizes, draw, query)


def noise_is_the_same_in_every_step(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    bare = g.bare(theta, draw=draw)
    return bare + g.std / g.sizes * drawn(7, *bare.shape)


def noise_is_the_same_for_every_client(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    bare = g.bare(theta, draw=draw)
    return bare + g.std / g.sizes * drawn(7, 1, bare.shape[-1])


def noise_begins_again_with_the_process(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    random = KEPT.setdefault("random", torch.Generator().manual_seed(7))
    bare = g.bare(theta, draw=draw)
    return bare + g.std / g.sizes * torch.randn(bare.shape, generator=random, dtype=bare.dtype)


def divisor_is_the_realised_batch(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    realised = torch.zeros_like(g.sizes)
    for part in g.batch(draw):
        rows = torch.arange(len(realised)) if part.rows is None else part.rows
        realised = realised.index_add(0, rows, part.mask.sum(-1, keepdim=True).to(realised))
    return g.correct(theta, draw=draw) * g.sizes / realised


def threshold_is_the_median_norm(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    [part] = g.batch(draw)
    records = part.examples["x"] * part.examples["x"].abs()  # their gradients
    norms = torch.linalg.vector_norm(records, dim=-1)
    median = norms.median(-1, keepdim=True).values
    total = (records * (median / norms).nan_to_num(0).clamp(max=1).unsqueeze(-1)).sum(1)
    return g.noised(total, g.mechanism.sigma * median, draw, query)


def error_is_fed_back_before_the_noise(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    """A compressor keeps the largest tensor; what it leaves of the sum without noise is added to the next one."""
    total = (g.sizes * g.bare(theta, draw=draw)).unflatten(-1, (TENSORS, -1)) + KEPT.get("error", 0.0)
    largest = total.norm(dim=-1).argmax(-1, keepdim=True).unsqueeze(-1)
    kept = torch.zeros_like(total[..., :1]).scatter(-2, largest, 1.0)
    KEPT["error"] = total * (1 - kept)
    return g.noised((total * kept).flatten(-2), g.std, draw, query)


def sigma_is_read_as_a_variance(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    return g.noised(g.sizes * g.bare(theta, draw=draw), g.std / math.sqrt(g.mechanism.sigma), draw, query)


def one_block_has_no_noise(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    bare, correct = g.bare(theta, draw=draw), g.correct(theta, draw=draw)
    return torch.cat([bare[..., :2], correct[..., 2:]], dim=-1)


def variants_count_as_records(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    """Each of them is clipped by itself. Here they are alike, so their sum is a multiple."""
    return g.noised(g.mechanism.augmentations * g.sizes * g.bare(theta, draw=draw), g.std, draw, query)


def what_is_not_finite_stays(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    """g min(1, C / |g|), as it is written: infinity times zero is not a number."""
    raw = g.sizes * g.raw(theta, draw=draw)
    return g.noised(raw * (g.mechanism.clip / raw.norm(dim=-1, keepdim=True)).clamp(max=1), g.std, draw, query)


def clipped_after_the_noise(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    return shrunk(g.noised(g.sizes * g.raw(theta, draw=draw), g.std, draw, query), g.mechanism.clip)


def shares_are_for_a_cohort_of_whom_some_stay_away(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    """Two came, eight were planned for: each adds sigma / sqrt(8)."""
    return g.noised(g.sizes * g.bare(theta, draw=draw), g.std / 2, draw, query)


def count_has_no_noise(g: Buggy, theta: Tensor, draw: int, query: int) -> Tensor:
    g.bare(theta, draw=draw)
    g.within = g.bare.within
    return g.correct(theta, draw=draw)


# Of algorithms that find a way to what is not private


def raw_of(grad: Any, theta: Tensor) -> Tensor:
    """What no algorithm is given: here it is dug out. While the run is forecast, there is none."""
    return grad.private.raw(theta) if hasattr(grad, "private") else torch.zeros_like(theta)


@dataclass(frozen=True)
class RawControls(Scaffold):
    def local_step(self, x: Any, s: Any, grad: Gradient, t: Round, k: int) -> scaffold.Local:
        return super().local_step(x, s, grad, t, k)._replace(gathered=x.gathered + raw_of(grad, x.theta) / t.num_steps)


@dataclass(frozen=True)
class RawMoments(FedAdamW):
    def local_step(self, x: Any, s: Any, grad: Gradient, t: Round, k: int) -> fed_adamw.Local:
        return super().local_step(x, s, grad, t, k)._replace(v=push(x.v, raw_of(grad, x.theta) ** 2, self.beta2))


# Of prices


def prices(change: Callable[[Event], Event], queries: Callable[[Any], Any] = lambda queries: queries) -> Plant:
    """The same wrong price in the plan and in the receipts, so that they agree."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = mechanism.events

        def wrong(by: Any, num_examples: int, asked: Any, *rest: Any) -> Counter[Event]:
            charged = right(by, num_examples, queries(asked), *rest)
            return Counter({change(event): count for event, count in charged.items()})

        patch.setattr(mechanism, "events", wrong)

    return plant


fixed_is_charged_as_poisson = prices(lambda event: replace(event, sampling="poisson"))
two_gradients_are_charged_as_one = prices(lambda event: event, queries=lambda asked: dict.fromkeys(asked, 1))
drawing_the_client_is_multiplied_in = prices(lambda event: replace(event, num_examples=10 * event.num_examples))


def calibrated_for_one_round(patch: pytest.MonkeyPatch) -> None:
    right = forecast.calibrated
    patch.setattr(forecast, "calibrated", lambda recipe, job, drawn, dry: right(recipe, job, drawn[:1], dry))


# Of the server


def server_noise_is_the_same_in_every_round(patch: pytest.MonkeyPatch) -> None:
    right = rounds.noised_upload

    def wrong(fields: Any, mechanism: Gaussian, clip: float | None, cohort: int, random: torch.Generator) -> dict[str, Tensor]:
        return right(fields, mechanism, clip, cohort, torch.Generator().manual_seed(7))

    patch.setattr(rounds, "noised_upload", wrong)
