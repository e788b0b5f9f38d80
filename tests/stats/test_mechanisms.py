"""Every variant of the mechanism: its noise has the scale that is charged, and nobody moves a sum by more than was promised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfed import FedAdamW, FedAvg, Gaussian, Plain, Recipe, Scaffold, Simulation, Task, algorithms, run
from dpfed.algorithm import Round, leaves
from dpfed.engines.simulation import Job, train_clients
from dpfed.flat import FlatModel
from dpfed.forecast import blank_upload, public_fields
from dpfed.ledger import Event
from dpfed.mechanism import AsReleased, Mechanism, events
from dpfed.privacy import Clipping, Part, PrivateGradient, Sums, clipped_upload, noised_upload
from tests.stats.test_noise import D, Linear, federation, has_scale, numbers, of_output

CLIPPINGS: list[Clipping] = ["flat", "block", "automatic", "adaptive"]
each_clipping = pytest.mark.parametrize("clipping", CLIPPINGS)


class Two(nn.Module):
    """Two tensors, and the record is the gradient of both of them together."""

    def __init__(self, first: int = 1, second: int = 2) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(first, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(second, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.first, self.second])


def gradient(
    mechanism: Mechanism,
    records: Tensor,
    mask: Tensor | None = None,
    noise: Callable[..., Tensor] | None = None,
    **setting: Any,
) -> PrivateGradient:
    """Of clients with these records ``[S, B, d]``, all of them in the batch, whose expected size is B."""
    num_clients, size, _ = records.shape
    model = FlatModel(Two(1, records.shape[-1] - 1), of_output)
    mask = torch.ones(num_clients, size, dtype=torch.bool) if mask is None else mask
    part = Part({"x": records, "y": torch.zeros(num_clients, size)}, mask)
    sizes = torch.full((num_clients, 1), float(size), dtype=torch.float64)
    sample = noise or (lambda total, std, draw, query: total)
    return PrivateGradient(Sums(model), lambda draw: [part], sample, sizes, mechanism, **setting)


def seeded(total: Tensor, std: Tensor | float, draw: int, query: int) -> Tensor:
    return total + std * torch.randn(total.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


# The noise


def noise_of(mechanism: Mechanism, **setting: Any) -> Tensor:
    """What comes out where there is no signal, times the size of the batch."""
    num_clients, size = 8, 5
    grad = gradient(mechanism, torch.zeros(num_clients, size, D, dtype=torch.float64), noise=seeded, **setting)
    released = size * grad(torch.zeros(D, dtype=torch.float64))
    std = size * grad.noise_var.expand(num_clients, 1).sqrt()
    assert has_scale(released / std, 1.0), "what algorithms are told about the noise is what was added"
    return released


@each_clipping
def test_noise_has_the_scale_that_is_charged(clipping: Clipping) -> None:
    """sigma C on every coordinate of the sum; adaptive clipping adds a little more, for the count."""
    mechanism = Gaussian(sigma=0.7, clip=0.3, clipping=clipping)
    std = 0.7 * 0.3 / math.sqrt(0.99 if clipping == "adaptive" else 1.0)
    assert has_scale(noise_of(mechanism), std)
    for wrong in (0.9, 1.1):
        assert not has_scale(noise_of(replace(mechanism, sigma=0.7 * wrong)), std)
        assert not has_scale(noise_of(mechanism), std * wrong)
    [event] = events(mechanism, 1000, {0: 1})
    assert event.sigma == 0.7


def test_noise_follows_the_threshold_of_the_round() -> None:
    mechanism = Gaussian(sigma=0.7, clip=0.3, clipping="adaptive")
    std = 0.7 * 2.0 / math.sqrt(0.99)
    assert has_scale(noise_of(mechanism, clip=2.0), std)
    assert not has_scale(noise_of(mechanism, clip=1.8), std)


def test_every_client_has_its_own_noise_where_it_is_calibrated_for_each() -> None:
    factors = torch.tensor([[1.0], [0.5]] * 4, dtype=torch.float64)
    released = noise_of(Gaussian(sigma=0.7, clip=0.3), factors=factors)
    assert has_scale(released[::2], 0.7 * 0.3)
    assert has_scale(released[1::2], 0.7 * 0.3 / 2)
    assert not has_scale(released[1::2], 0.7 * 0.3 / 2 * 1.1)


def test_the_count_has_the_noise_that_is_charged_with_the_sum() -> None:
    """1 / sigma^2 = 1 / sigma_g^2 + 1 / (2 sigma_b)^2, with both of them measured."""
    num, sigma, clip = 20_000, 1.3, 0.5
    records = torch.zeros(num, 1, 3, dtype=torch.float64)
    grad = gradient(Gaussian(sigma=sigma, clip=clip, clipping="adaptive"), records, noise=seeded)
    on_sum = grad(torch.zeros(3, dtype=torch.float64)) / clip
    on_count = grad.within - 0.5  # every record is within the threshold
    assert has_scale(on_count, 5 * sigma)
    for wrong in (0.9, 1.1):
        assert not has_scale(on_count, 5 * sigma * wrong)
    together = 1 / float(on_sum.square().mean()) + 1 / (4 * float(on_count.square().mean()))
    assert together == pytest.approx(1 / sigma**2, rel=0.05)
    assert float(torch.corrcoef(torch.stack([on_sum[:, 0], on_count[:, 0]]))[0, 1]) == pytest.approx(0, abs=0.04)


def test_shared_noise_carries_the_count_as_well() -> None:
    mechanism = Gaussian(sigma=1.3, clip=0.5, clipping="adaptive", noise="distributed")
    grad = gradient(mechanism, torch.zeros(20_000, 1, 3, dtype=torch.float64), noise=seeded, cohort_size=4)
    grad(torch.zeros(3, dtype=torch.float64))
    assert has_scale(grad.within - 0.5, 5 * 1.3 / 2)


def test_the_servers_noise_has_the_scale_that_is_charged() -> None:
    """sigma C over the expected cohort, on every coordinate of every field, and on the count."""
    fields = {"delta": torch.zeros(20_000, dtype=torch.float64), "c": torch.zeros(20_000, dtype=torch.float64)}
    random = torch.Generator().manual_seed(2)
    noised = noised_upload(fields, Gaussian(sigma=0.7, clip=0.3, unit="client"), None, 4, random)
    for field in noised.values():
        assert has_scale(field, 0.7 * 0.3 / 4)
        assert not has_scale(field, 0.7 * 0.3 / 4 * 0.9)
        assert not has_scale(field, 0.7 * 0.3 / 4 * 1.1)
    assert abs(float(torch.corrcoef(torch.stack(list(noised.values())))[0, 1])) < 0.04
    adaptive = Gaussian(sigma=0.7, clip=0.3, unit="client", clipping="adaptive")
    counts = torch.cat(
        [
            noised_upload({"delta": torch.zeros(1), "within": torch.zeros(1)}, adaptive, 2.0, 4, random)["within"]
            for _ in range(8000)
        ]
    )
    assert has_scale(counts, 5 * 0.7 / 4)
    assert not has_scale(counts, 5 * 0.7 / 4 * 1.1)


@pytest.mark.parametrize("wrong", [0.9, 1.0, 1.1])
def test_a_run_for_clients_has_that_noise(wrong: float, tmp_path: Path) -> None:
    """Without a signal the model after one round is the server's noise, also when nobody came."""
    d = 20_000
    zeros = torch.zeros(8, d, dtype=torch.float64)
    mechanism = Gaussian(sigma=0.7 * wrong, clip=0.3, unit="client", batch_size=2)
    pool = federation(zeros, 8)
    for num_clients in (0, 3):
        seed = next(seed for seed in range(99) if len(pool.cohort(seed, 0, 2, "poisson")) == num_clients)
        recipe = Recipe(Task(Linear(d), pool, of_output), FedAvg(), mechanism, rounds=1, local_steps=1)
        recipe = replace(recipe, cohort=2, cohort_sampling="poisson", seed=seed, engine=Simulation(device="cpu"))
        record = run(recipe, tmp_path / str(seed))
        assert record.rows[0]["clients"] == num_clients
        assert has_scale(record.load_model()["weight"], 0.7 * 0.3 / 2) == (wrong == 1.0)


# The sensitivity


def summed(clipping: Clipping, records: Tensor, mask: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The sum and the count without noise."""
    grad = gradient(Gaussian(sigma=0.0, clip=clip, clipping=clipping), records, mask)
    return records.shape[1] * grad(torch.zeros(3, dtype=torch.float64)), records.shape[1] * grad.within


@each_clipping
@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=6), st.integers(0, 5), st.floats(1e-3, 10))
def test_removing_a_record_moves_the_sum_by_at_most_the_clip(clipping: Clipping, rows: Any, who: int, clip: float) -> None:
    """Whatever the gradients: huge, tiny, infinite or not a number. And the count moves by at most a half."""
    records, mask = torch.tensor([rows], dtype=torch.float64), torch.ones(1, len(rows), dtype=torch.bool)
    with_all, count = summed(clipping, records, mask, clip)
    mask = mask.clone()
    mask[0, who % len(rows)] = False
    without, one_less = summed(clipping, records, mask, clip)
    assert bool(with_all.isfinite().all())
    assert float((with_all - without).norm()) <= clip * (1 + 1e-9)
    assert float((count - one_less).abs()) == pytest.approx(0.5 if clipping == "adaptive" else 0.0, abs=1e-9)


@given(
    st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=1, max_size=5),
    st.integers(0, 4),
    st.floats(1e-3, 10),
    st.sampled_from(["flat", "automatic", "adaptive"]),
)
def test_removing_a_client_moves_the_sum_of_uploads_by_at_most_the_clip(
    rows: Any, who: int, clip: float, clipping: Clipping
) -> None:
    """Over all of its fields together."""
    delta, c = torch.tensor(rows, dtype=torch.float64).split([3, 1], dim=-1)
    clipped, within = clipped_upload({"delta": delta, "c": c}, clip, clipping)
    joint = torch.cat(list(clipped.values()), dim=-1)
    assert bool(joint.isfinite().all())
    others = torch.arange(len(rows)) != who % len(rows)
    assert float((joint.sum(0) - joint[others].sum(0)).norm()) <= clip * (1 + 1e-9)
    assert float((within.sum() - within[others].sum()).abs()) == 0.5


@pytest.mark.parametrize("name", algorithms.__all__)
def test_no_upload_is_longer_than_the_clip(name: str) -> None:
    """Of any algorithm; the fields that are left out are the same for clients with quite different data."""
    algorithm, num_steps = (
        getattr(algorithms, name)(lr=1.0),
        1 if name in ("SGD", "Adam", "AdamBC", "AdamW", "AdamWBC", "MicroAdam") else 3,
    )
    model = FlatModel(Two(), of_output)
    records = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 30
    work = Job(model, federation(records, 4), algorithm, Gaussian(sigma=1.0, clip=0.5, unit="client", batch_size=5), 3)
    s = algorithm.server_init(model.theta0(), model.layout)
    t = Round(0, 1.0, num_steps, model.layout)
    t = replace(t, public=public_fields(algorithm, t))
    uploads, _, receipts = train_clients(work, t, s, [0, 1, 2, 3], {})
    blank = dict(leaves(blank_upload(algorithm, s, t)))
    for upload in uploads:
        fields = dict(leaves(upload))
        private = torch.cat([field for path, field in fields.items() if path not in t.public])
        assert 0 < float(private.norm()) <= 0.5 * (1 + 1e-9)
        assert all(fields[path].equal(blank[path].expand_as(fields[path])) for path in t.public)
    assert not any(receipt.events for receipt in receipts), "a step costs nothing: the round does"


def test_what_depends_on_no_data_is_found_in_every_round() -> None:
    layout = FlatModel(Two(), of_output).layout
    first, later = Round(0, 1.0, 3, layout), Round(1, 1.0, 3, layout)
    assert public_fields(FedAvg(), first) == set()
    assert {"phi", "v.weight"} <= public_fields(FedAdamW(), first)
    assert not {"delta", "v.value"} & public_fields(FedAdamW(), first)
    warming = Scaffold(warm_start=1)  # moves nothing in its first round, and then everything
    assert public_fields(warming, first) == {"delta"}
    assert public_fields(warming, later) == set()


# The clippings by hand


def clipped_by(clipping: Clipping, rows: list[list[float]], clip: float) -> list[float]:
    records = torch.tensor([rows], dtype=torch.float64)
    total, _ = summed(clipping, records, torch.ones(1, len(rows), dtype=torch.bool), clip)
    return [round(x, 9) for x in total[0].tolist()]


def test_each_clipping_by_hand() -> None:
    """Tensors of 1 and 2 coordinates; the record has norm 13, its tensors 5 and 12."""
    row = [5.0, 12.0, 0.0]
    assert clipped_by("flat", [row], 6.5) == [2.5, 6.0, 0.0]
    assert clipped_by("adaptive", [row], 6.5) == [2.5, 6.0, 0.0]
    assert clipped_by("block", [row], 8 * math.sqrt(2)) == [5.0, 8.0, 0.0]
    assert clipped_by("automatic", [row], 13.01) == [5.0, 12.0, 0.0]
    assert clipped_by("automatic", [[0.0, 0.03, 0.0]], 1.0) == [0.0, 0.75, 0.0], "small gradients grow"
    nan = [[math.nan, 1.0, 0.0], row]
    assert clipped_by("flat", nan, 6.5) == [2.5, 6.0, 0.0]
    assert clipped_by("block", nan, 8 * math.sqrt(2)) == [5.0, 9.0, 0.0], "its other tensor is finite"


def test_padding_is_not_counted() -> None:
    records = torch.tensor([[[1.0, 0, 0], [9.0, 0, 0], [0.0, 0, 0]]], dtype=torch.float64)
    _, count = summed("adaptive", records, torch.tensor([[True, True, False]]), 2.0)
    assert float(count) == 0.0, "one within, one beyond"


@pytest.mark.parametrize("unit", ["example", "client"])
def test_the_threshold_finds_the_quantile(unit: Any, tmp_path: Path) -> None:
    """The norms of gradients are 1 to 100; a quarter of them is within 25. For clients: their uploads', 0.1 of that."""
    records = torch.zeros(400, 3, dtype=torch.float64)
    records[:, 0] = torch.arange(400) % 100 + 1
    if unit == "client":
        records = records.sort(dim=0).values  # a client's gradients are all alike
    start = 15.0 if unit == "example" else 1.5
    mechanism = Gaussian(sigma=0.02, clip=start, clipping="adaptive", quantile=0.25, unit=unit, batch_size=400)
    task = Task(Linear(3), federation(records, 100 if unit == "client" else 1), of_output)
    size = 100 if unit == "client" else 1
    recipe = Recipe(task, FedAvg(lr=0.1, weight_decay=0.0), mechanism, rounds=60, local_steps=1, cohort=size, evaluate_every=60)
    record = run(replace(recipe, schedule="constant", engine=Simulation(device="cpu")), tmp_path / "run")
    _, tensors = record.restore() or (0, {})
    aim = 25.0 if unit == "example" else 2.5
    assert float(tensors["clip"]) == pytest.approx(aim, rel=0.1)


def test_as_released_by_hand() -> None:
    """The mean gradient of the batch, each tensor clipped to C, noise sigma C / B; and it is charged as what it is."""
    records = torch.tensor([[[3.0, 3.0, 0.0], [1.0, 1.0, 0.0]]], dtype=torch.float64)
    mechanism = AsReleased(sigma=0.0, clip=0.5)
    assert gradient(mechanism, records)(torch.zeros(3, dtype=torch.float64)).tolist() == [[0.5, 0.5, 0.0]]
    assert gradient(mechanism, 0.1 * records)(torch.zeros(3, dtype=torch.float64))[0].tolist() == pytest.approx([0.2, 0.2, 0.0])
    assert has_scale(noise_of(AsReleased(sigma=0.7, clip=0.3)), 0.7 * 0.3)
    assert not has_scale(noise_of(AsReleased(sigma=0.7, clip=0.3)), 0.7 * 0.3 * 1.1)
    [event] = events(AsReleased(sigma=100.0), 1000, {0: 1})
    assert event.sigma == 0.0


def test_passes_over_the_records_are_charged_as_without_noise() -> None:
    """Also for a mechanism of one's own that adds some: no accountant here covers them."""
    noisy = Gaussian(sigma=100.0)
    object.__setattr__(noisy, "sampling", "shuffled")
    for mechanism in (Plain(sampling="shuffled"), noisy):
        assert events(mechanism, 1000, {0: 1}) == Counter([Event("fixed", 64, 1000, 0.0)])


def test_plain_gradients_and_those_of_protected_clients_are_not_clipped() -> None:
    records = torch.full((1, 2, 3), 7.0, dtype=torch.float64)
    for mechanism in (Plain(), Gaussian(sigma=1.0, clip=0.1, unit="client")):
        grad = gradient(mechanism, records)
        assert grad(torch.zeros(3, dtype=torch.float64)).tolist() == [[7.0, 7.0, 7.0]]
        assert float(grad.noise_var.sum()) == 0
