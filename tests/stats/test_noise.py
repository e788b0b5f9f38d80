"""The noise and the sampling have the scale that is paid for. Every test also rejects a scale that is 10 % off."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfed import data
from dpfed.algorithm import Round
from dpfed.algorithms import FedAdamW, FedAvg
from dpfed.data import Federation
from dpfed.engines.simulation import Job, Simulation, train_clients
from dpfed.flat import FlatModel
from dpfed.privacy import Gaussian, Sums

D = 4000


class Linear(nn.Module):
    """Its output is the inner product with the record, so the record is its own gradient."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def of_output(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def federation(records: Tensor, num_clients: int) -> Federation:
    rows = torch.arange(len(records)).tensor_split(num_clients)
    return Federation({"x": records, "y": torch.zeros(len(records))}, tuple(rows))


def released(mechanism: Gaussian, records: Tensor, num_clients: int = 2, rounds: int = 1, num_steps: int = 3) -> Tensor:
    """The gradients that FedAvg's clients release, [rounds, clients, d], summed over their steps (lr 1, no decay)."""
    model = FlatModel(Linear(records.shape[1]), of_output)
    job = Job(model, federation(records, num_clients), FedAvg(lr=1.0, weight_decay=0.0), mechanism, seed=11)
    s = job.algorithm.server_init(model.theta0(), model.layout)
    deltas = []
    for t in range(rounds):
        uploads, _, _ = train_clients(job, Round(t, 1.0, num_steps, model.layout), s, list(range(num_clients)), {})
        deltas.append(torch.stack([-upload.delta for upload in uploads]))
    return torch.stack(deltas)


def has_scale(sample: Tensor, std: float) -> bool:
    """Chi-square: the mean square is 1 within five of its standard deviations, which is 4 % for 30,000 numbers."""
    ratio = float((sample / std).square().mean())
    return abs(ratio - 1) < 5 * math.sqrt(2 / sample.numel()) < 0.1


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_noise_has_the_scale_that_is_charged(sampling: data.Sampling) -> None:
    """sigma C / B per coordinate and step, whatever the batch really was; 0.9 and 1.1 of it are rejected."""
    mechanism = Gaussian(sigma=0.7, clip=0.3, batch_size=5, sampling=sampling)
    std = 0.7 * 0.3 / 5 * math.sqrt(3)
    zero_gradients = torch.zeros(40, D, dtype=torch.float64)
    sample = released(mechanism, zero_gradients, rounds=2)
    assert has_scale(sample, std)
    for wrong in (0.9, 1.1):
        assert not has_scale(released(replace(mechanism, sigma=0.7 * wrong), zero_gradients, rounds=2), std)
        assert not has_scale(sample, std * wrong)


def test_a_client_smaller_than_the_batch_divides_by_what_it_has() -> None:
    sample = released(Gaussian(sigma=1.0, clip=1.0, batch_size=64), torch.zeros(10, D, dtype=torch.float64), num_steps=1)
    assert has_scale(sample, 1 / 5)


def test_noise_is_normal() -> None:
    sample = released(
        Gaussian(sigma=1.0, clip=1.0, batch_size=1), torch.zeros(40, D, dtype=torch.float64), num_steps=1, rounds=5
    )
    ordered = sample.flatten().sort().values
    uniform = torch.special.ndtr(ordered)
    n = len(ordered)
    distance = float((uniform - torch.arange(n) / n).abs().max())
    assert distance < 1.95 / math.sqrt(n), "Kolmogorov-Smirnov at 0.1 %"
    assert float((torch.special.ndtr(ordered / 1.1) - torch.arange(n) / n).abs().max()) > 1.95 / math.sqrt(n)


def test_no_noise_is_used_twice() -> None:
    """Clients, steps, rounds, gradients of one step and batches of one step all draw their own; the same key draws the same."""
    keys = list(itertools.product(range(2), repeat=5))
    draws = torch.stack([torch.randn(D, generator=data.generator(3, "noise", *key)) for key in keys])
    correlation = torch.corrcoef(draws).fill_diagonal_(0).abs().max()
    assert correlation < 6 / math.sqrt(D)
    again = torch.stack([torch.randn(D, generator=data.generator(3, "noise", *key)) for key in keys])
    assert draws.equal(again)
    steps = released(Gaussian(sigma=1.0, clip=1.0, batch_size=4), torch.zeros(40, D, dtype=torch.float64), rounds=2)
    assert torch.corrcoef(steps.flatten(0, 1)).fill_diagonal_(0).abs().max() < 6 / math.sqrt(D)


numbers = st.floats(-1e30, 1e30, allow_nan=False) | st.sampled_from([0.0, 1e-300, 1e300, -1e300, math.inf, -math.inf, math.nan])


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=6), st.integers(0, 5), st.floats(1e-3, 10))
def test_removing_a_record_moves_the_clipped_sum_by_at_most_the_clip(rows: list[list[float]], who: int, clip: float) -> None:
    """Whatever the gradients: huge, tiny, infinite or not a number."""
    model = FlatModel(Linear(3), of_output)
    records = torch.tensor([rows], dtype=torch.float64)
    columns = {"x": records, "y": torch.zeros(1, len(rows))}
    points = [(1.0, model.theta0().unsqueeze(0))]
    with_all = Sums(model).clipped(points, columns, torch.ones(1, len(rows), dtype=torch.bool), clip)[0]
    mask = torch.ones(1, len(rows), dtype=torch.bool)
    mask[0, who % len(rows)] = False
    without = Sums(model).clipped(points, columns, mask, clip)[0]
    assert bool(with_all.isfinite().all())
    assert float((with_all - without).norm()) <= clip * (1 + 1e-9)


def test_clipping_keeps_small_gradients_and_scales_large_ones_to_the_clip() -> None:
    records = torch.tensor([[[0.3, 0.4, 0.0], [30.0, 40.0, 0.0]]], dtype=torch.float64)
    columns, ones = {"x": records, "y": torch.zeros(1, 2)}, torch.ones(1, 2, dtype=torch.bool)
    model = FlatModel(Linear(3), of_output)
    total = Sums(model).clipped([(1.0, model.theta0().unsqueeze(0))], columns, ones, 1.0)[0]
    torch.testing.assert_close(total, torch.tensor([[0.3 + 0.6, 0.4 + 0.8, 0.0]], dtype=torch.float64))


def rate_is(num_examples: int, batch_size: int, rate: float) -> bool:
    facts = {"num_examples": num_examples, "batch_size": batch_size, "sampling": "poisson"}
    chosen = torch.zeros(300, num_examples)
    for k in range(300):
        chosen[k, data.batch(0, 0, 0, k, **facts)] = 1
    spread = math.sqrt(rate * (1 - rate) / chosen.numel())
    sizes = chosen.sum(1)
    expected = num_examples * rate * (1 - rate)
    return abs(float(chosen.mean()) - rate) < 5 * spread and abs(float(sizes.var()) / expected - 1) < 5 * math.sqrt(2 / 300)


def test_poisson_batches_have_the_rate_that_is_charged() -> None:
    """Rate and variance of the size (independent coins); 0.9 and 1.1 of the rate are rejected."""
    assert rate_is(1000, 160, 0.16)
    assert not rate_is(1000, 144, 0.16)
    assert not rate_is(1000, 176, 0.16)


def test_poisson_batches_are_sometimes_empty_and_then_release_only_noise() -> None:
    facts = {"num_examples": 50, "batch_size": 1, "sampling": "poisson"}
    sizes = [len(data.batch(11, t, i, 0, **facts)) for t in range(40) for i in range(2)]
    assert 0.2 < sizes.count(0) / len(sizes) < 0.55, "expected 0.98 ** 50 = 0.36"
    mechanism = Gaussian(sigma=1.0, clip=1.0, batch_size=1)
    sample = released(mechanism, torch.full((100, D), 1e6, dtype=torch.float64), rounds=40, num_steps=1)
    means = sample.mean(-1).flatten()
    for size, mean in zip(sizes, means.tolist(), strict=True):
        assert abs(-size / math.sqrt(D) + mean) < 6 / math.sqrt(D), "the sum moves by exactly C a record"


def test_large_poisson_batches_are_never_cut_off() -> None:
    """Every record has gradient e: the sum over a batch far beyond the expected size is that size."""
    records = torch.full((400, 2), 1e-3, dtype=torch.float64)
    mechanism = Gaussian(sigma=0.0, clip=1.0, batch_size=8)
    sample = released(mechanism, records, rounds=200, num_steps=1, num_clients=4)[..., 0] * 8 / 1e-3
    facts = {"num_examples": 100, "batch_size": 8, "sampling": "poisson"}
    sizes = torch.tensor([[len(data.batch(11, t, i, 0, **facts)) for i in range(4)] for t in range(200)])
    assert int(sizes.max()) > 14, "the test must see overflow"
    torch.testing.assert_close(sample, sizes.double())


def test_second_moment_is_signal_plus_noise_in_every_round() -> None:
    """E[v / weight] = s + Phi (spec 2.3), for rounds 0 to 4, within five standard deviations of the mean over coordinates;
    the printed v / (1 - b2^K) misses it by more than 40 % from the second round on."""
    sigma, clip, size, steps, beta2 = 0.03, 1.0, 4, 5, 0.99  # signal and noise are about equal
    signal = 0.5 / math.sqrt(D)
    records = torch.full((8, D), signal, dtype=torch.float64)
    algorithm = FedAdamW(lr=1e-9, weight_decay=0.0, blocks="none", beta2=beta2)
    model = FlatModel(Linear(D), of_output)
    job = Job(model, federation(records, 2), algorithm, Gaussian(sigma=sigma, clip=clip, batch_size=size), seed=5)
    engine, s = Simulation(device="cpu").open(job), algorithm.server_init(model.theta0(), model.layout)
    phi = (sigma * clip / size) ** 2
    for t in range(5):
        now = Round(t, 1.0, steps, model.layout)
        u, _ = engine.train(now, s, [0, 1])
        s = algorithm.server_step(s, u, now)
        found = s.v.value / s.v.weight
        error = float(found.std()) / math.sqrt(D)
        assert abs(float(found.mean()) - (signal**2 + phi)) < 5 * error
        assert float(s.phi / s.v.weight) == pytest.approx(phi)
        printed = float(s.v.value.mean()) / (1 - beta2**steps)
        if t > 0:
            assert abs(printed / (signal**2 + phi) - 1) > 0.4


def test_all_bits_of_a_key_count() -> None:
    """Two keys that agree in their last 32 bits draw nothing alike; torch's own seeding would."""
    numbers = [1, 1 + 2**32, 1 + 2**40]
    plain = [torch.randn(5, generator=torch.Generator().manual_seed(number)) for number in numbers]
    assert plain[0].equal(plain[1]), "if this no longer holds, the state need not be filled by hand"
    first, later = dict[int, int](), dict[int, int]()
    for t in range(300_000):
        last = data.key(0, "noise", t) % 2**32
        if last in first:
            later[t] = first[last]
        first[last] = t
    assert later, "such pairs come up in any long run"
    for t, other in later.items():
        a, b = (torch.randn(1000, generator=data.generator(0, "noise", i), dtype=torch.float64) for i in (t, other))
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 6.5 / 1000**0.5
    sample = torch.cat([torch.randn(50, generator=data.generator(0, "noise", t), dtype=torch.float64) for t in range(2000)])
    assert abs(float(sample.mean())) < 6 / len(sample) ** 0.5
    assert abs(float(sample.square().mean()) - 1) < 6 * (2 / len(sample)) ** 0.5
