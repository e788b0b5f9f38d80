"""The algorithms whose server steps: equal to the referees, to torch's optimizers, and to numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpfed import (
    SGD,
    Adam,
    AdamBC,
    AdamW,
    AdamWBC,
    Federation,
    Gaussian,
    InputError,
    Layout,
    MicroAdam,
    Recipe,
    RunRecord,
    Task,
    iid,
    run,
)
from dpfed.algorithm import Release, Round, num_bytes
from dpfed.engines.simulation import Job, Simulation
from dpfed.flat import Part
from dpfed.pieces import dequantise, quantise, schedule_scale
from dpfed.rounds import begin, dry_round
from tests.paper import twins
from tests.paper.world import MECHANISMS, NUM_ROUNDS, PRIVATE, assert_equal, job, trained, world

LR = 0.02
ATTENTION = [48, 12, 12, 3]  # the tensors of the little model of the tests

SWITCHES: list[tuple[type[Any], Callable[..., list[np.ndarray]], list[dict[str, Any]]]] = [
    (SGD, twins.sgd, [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.1}]),
    (Adam, twins.adam, [{}, {"weight_decay": 0.1}, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}]),
    (AdamW, twins.adamw, [{}, {"eps_inside": True, "eps": 1e-3}, {"beta1": 0.0, "beta2": 0.9}]),
    (AdamBC, twins.adam_bc, [{}, {"floor": 1e-3}, {"floor_decay": 0.5}, {"eps": 1e-2}, {"weight_decay": 0.1}, {"beta2": 0.9}]),
    (AdamWBC, twins.adamw_bc, [{}, {"floor": 1e-3}, {"floor_decay": 0.5}, {"eps": 1e-2}, {"beta2": 0.9}]),
    (
        MicroAdam,
        twins.micro_adam,
        [
            {},
            {"window": 1},
            {"window": 3},
            {"density": 0.1},
            {"density": 1.0},
            {"ef_bits": None},
            {"quant_block": 8},
            {"bias_correction": "window"},
            {"weight_decay": 0.1},
            {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3},
        ],
    ),
]
USUAL: dict[type[Any], dict[str, Any]] = {
    AdamW: {"weight_decay": 0.1},
    AdamBC: {"floor": 1e-4},
    AdamWBC: {"floor": 1e-4, "weight_decay": 0.1},
    MicroAdam: {"density": 0.22, "window": 2},  # no two magnitudes at the edge of a top are equal but for rounding
}
CASES = [(kind, twin, switches) for kind, twin, cases in SWITCHES for switches in cases]


@pytest.fixture(params=MECHANISMS)
def mechanism(request: pytest.FixtureRequest) -> Any:
    return MECHANISMS[request.param]


@pytest.mark.parametrize(("kind", "twin", "switches"), CASES, ids=[f"{kind.__name__} {s}" for kind, _, s in CASES])
def test_equals_its_twin(mechanism: Any, kind: type[Any], twin: Callable[..., Any], switches: dict[str, Any]) -> None:
    settings = {"lr": LR, **USUAL.get(kind, {}), **switches}
    work = job(kind(**settings), mechanism)
    named_by_the_twin = {"gamma_decay" if name == "floor_decay" else name: value for name, value in settings.items()}
    further = {"tensor_sizes": ATTENTION} if kind is MicroAdam else {}
    assert_equal(trained(work, num_steps=1), twin(world(work, num_steps=1), **named_by_the_twin, **further))


@pytest.mark.parametrize("kind", [kind for kind, _, _ in SWITCHES])
def test_a_second_local_step_is_refused(kind: type[Any]) -> None:
    assert [dict(step) for step in dry_round(kind(), num_steps=1).queries] == [{0: 1}]
    with pytest.raises(InputError, match=r"local_steps: must be 1 .* got 2.*Set local_steps=1"):
        dry_round(kind(), num_steps=2)


# One client with all the data is ordinary training.


def central_job(algorithm: Any, num_clients: int) -> Job:
    size = 60 // num_clients
    work = job(algorithm, replace(PRIVATE, sigma=0.0, clip=math.inf, batch_size=size))
    return work._replace(federation=Federation(work.federation.records, torch.arange(60).split(size)))


TORCH: list[tuple[Any, type[Any], dict[str, float]]] = [
    (SGD(lr=LR, momentum=0.9, weight_decay=0.1), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (Adam(lr=LR, weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    (AdamW(lr=LR, weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
    (AdamBC(lr=LR, eps=1e-8, floor=0.0), torch.optim.Adam, {}),
    (AdamWBC(lr=LR, weight_decay=0.1, eps=1e-8, floor=0.0), torch.optim.AdamW, {"weight_decay": 0.1}),
    (MicroAdam(lr=LR, density=1.0, window=5, ef_bits=None), torch.optim.Adam, {}),
    (MicroAdam(lr=LR, weight_decay=0.1, density=1.0, window=5), torch.optim.AdamW, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("num_clients", [1, 3])
@pytest.mark.parametrize(
    ("algorithm", "optimizer", "settings"), TORCH, ids=[type(algorithm).__name__ for algorithm, *_ in TORCH]
)
def test_clients_with_all_data_in_every_step_are_a_hand_written_torch_loop(
    algorithm: Any, optimizer: type[Any], settings: dict[str, float], num_clients: int
) -> None:
    work, num_rounds = central_job(algorithm, num_clients), 5
    module, columns = work.model.module, work.federation.records
    s, engine = algorithm.server_init(work.model.theta0(), work.model.layout), Simulation(device="cpu").open(work)
    states = []
    for t in range(num_rounds):
        now = Round(t, schedule_scale("cosine", t, num_rounds), 1, work.model.layout)
        u, _ = engine.train(now, s, list(range(num_clients)))
        s = algorithm.server_step(s, u, now)
        states.append(s.theta)

    by_torch = optimizer(module.parameters(), LR, **settings)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(by_torch, num_rounds)
    for theta in states:
        by_torch.zero_grad()
        nn.functional.cross_entropy(module(columns["x"]), columns["y"]).backward()
        by_torch.step()
        cosine.step()
        expected = nn.utils.parameters_to_vector(module.parameters()).detach()
        assert (theta - expected).abs().max() / expected.abs().max() < 1e-12


# The numbers, by hand. A server fed with gradients alone needs no federation.


def layout_of(*sizes: int) -> Layout:
    return Layout(tuple(Part(f"tensor{i}", (size,), "weights") for i, size in enumerate(sizes)))


def served(algorithm: Any, gradients: Sequence[Tensor], layout: Layout, phi: Sequence[float] | None = None) -> list[Any]:
    """The server's states, from zero parameters on."""
    s, states = algorithm.server_init(torch.zeros_like(gradients[0]), layout), []
    for t, g in enumerate(gradients):
        u = Release(g, g.new_tensor([phi[t] if phi else 0.0]))
        s = algorithm.server_step(s, u, Round(t, 1.0, 1, layout, shrinkage=0.5))
        states.append(s)
    return states


def random_gradients(num_steps: int, size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    return [torch.randn(size, generator=random, dtype=torch.float64).to(dtype) for _ in range(num_steps)]


def test_the_correction_subtracts_the_noise_of_the_mean() -> None:
    """Two clients whose noise variances are 1 and 3: their mean of 2 shrinks by half, to (1 + 3) / 4 = 1."""
    [s] = served(AdamBC(lr=0.1), [torch.tensor([2.0]).double()], layout_of(1), phi=[2.0])
    assert float(s.theta) == pytest.approx(-0.1 * 2 / math.sqrt(4 - 1), rel=1e-14)


def test_the_correction_stays_exact_where_the_noise_changes() -> None:
    """v weighs the old square with 0.09, the new one with 0.1; so is the noise weighed that is subtracted (halved: 1, 3)."""
    gradients = [torch.tensor([3.0]).double()] * 2
    states = served(AdamWBC(lr=0.1, weight_decay=0.0, beta2=0.9), gradients, layout_of(1), phi=[2.0, 6.0])
    step = float(states[1].theta - states[0].theta)
    assert step == pytest.approx(-0.1 * 3 / math.sqrt(9 - (0.09 * 1 + 0.1 * 3) / 0.19), rel=1e-13)


def test_quantiser_is_golden() -> None:
    x = torch.tensor([-0.8, -0.35, -0.1, 0.0, 0.05, 0.2, 0.6, 0.7], dtype=torch.float64)
    packed = quantise(x, sizes=[8], block=8)
    assert packed.codes.tolist() == [0x05, 0x78, 0x9A, 0xEF]  # the first of two stands in the high half
    assert (packed.low.tolist(), packed.high.tolist()) == ([-0.8], [0.7])
    back = dequantise(packed, sizes=[8], block=8, dtype=x.dtype)
    np.testing.assert_allclose(back.numpy(), [-0.8, -0.3, -0.1, 0, 0.1, 0.2, 0.6, 0.7], rtol=0, atol=1e-15)


@pytest.mark.parametrize("block", [2, 4, 64])
def test_quantiser_equals_its_twin_tensor_by_tensor(block: int) -> None:
    sizes = [7, 1, 64, 65, 130]
    [x] = random_gradients(1, sum(sizes))
    expected = np.concatenate([twins.quantise_and_back(part.numpy(), 4, block) for part in x.split(sizes)])
    back = dequantise(quantise(x, sizes, block), sizes, block, x.dtype)
    np.testing.assert_allclose(back.numpy(), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantiser_keeps_a_constant_block(dtype: torch.dtype) -> None:
    x = torch.tensor([3.0] * 4 + [0.0] * 4 + [0.0, 15.0, 15.0], dtype=dtype)
    packed = quantise(x, sizes=[8, 3], block=4)
    assert packed.codes.tolist() == [0, 0, 0, 0, 0x0F, 0xFF]
    assert dequantise(packed, [8, 3], 4, dtype).equal(x)


def test_quantiser_in_float32_errs_by_half_a_step_and_the_rounding_of_the_ends() -> None:
    [x] = random_gradients(1, 64_000, torch.float32)
    packed = quantise(x, [64_000], 64)
    assert packed.low.dtype == packed.high.dtype == torch.bfloat16
    error = (dequantise(packed, [64_000], 64, x.dtype) - x).view(-1, 64).abs().amax(1)
    low, high = x.view(-1, 64).aminmax(dim=1)
    assert bool((error <= (high - low) / 30 + torch.maximum(low.abs(), high.abs()) / 128).all())


def test_ring_is_golden() -> None:
    """Three slots at t = 4 are 0, 2 and 1 steps old, at t = 5 they are 1, 0 and 2."""
    algorithm = MicroAdam(lr=1.0, density=1.0, window=3, beta1=0.5, beta2=0.25, eps=0.0, ef_bits=None)
    g = [5.0, -1.0, 2.0, 0.5, -4.0]
    states = served(algorithm, [torch.tensor([value]).double() for value in g], layout_of(1))
    assert states[3].ring.values.tolist() == [g[3], g[1], g[2]]
    assert states[4].ring.values.tolist() == [g[3], g[4], g[2]]
    for t, ages in ((4, (0, 2, 1)), (5, (1, 0, 2))):
        slots = list(zip(ages, states[t - 1].ring.values.tolist(), strict=True))
        m = sum(0.5**age * value for age, value in slots) * 0.5 / (1 - 0.5**t)
        v = sum(0.25**age * value**2 for age, value in slots) * 0.75 / (1 - 0.25**t)
        step = float(states[t - 1].theta - states[t - 2].theta)
        assert step == pytest.approx(-m / math.sqrt(v), rel=1e-14)


@pytest.mark.parametrize("correction", ["paper", "window"])
def test_micro_adam_that_keeps_all_is_adam(correction: Any) -> None:
    gradients, layout = random_gradients(6, 90), layout_of(70, 20)
    micro = MicroAdam(lr=LR, density=1.0, window=6, ef_bits=None, bias_correction=correction)
    for mine, adam in zip(served(micro, gradients, layout), served(Adam(lr=LR), gradients, layout), strict=True):
        torch.testing.assert_close(mine.theta, adam.theta, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_left_over_where_all_is_kept(dtype: torch.dtype) -> None:
    for s in served(MicroAdam(density=1.0), random_gradients(4, 90, dtype), layout_of(70, 20)):
        assert not dequantise(s.error, [70, 20], 64, dtype).any()


def test_nothing_is_lost_without_quantisation() -> None:
    """What was put in is what the slots and the remainder hold."""
    gradients = random_gradients(5, 50)
    s = served(MicroAdam(density=0.1, window=5, ef_bits=None), gradients, layout_of(30, 20))[-1]
    held = s.error.index_add(0, s.ring.places, s.ring.values)
    torch.testing.assert_close(held, torch.stack(gradients).sum(0), rtol=0, atol=1e-14)
    assert [int((slot < 30).sum()) for slot in s.ring.places.view(5, -1)] == [3] * 5, "the top is one of every tensor"


def test_micro_adam_moves_only_what_its_window_holds() -> None:
    g = torch.tensor([4.0, -3.0, 2.0, 1.0]).double()
    states = served(MicroAdam(lr=0.1, density=0.25, ef_bits=None), [g] * 4, layout_of(4))
    assert states[-1].ring.places[:4].tolist() == [0, 1, 0, 2]
    assert [s.theta.nonzero().flatten().tolist() for s in states] == [[0], [0, 1], [0, 1], [0, 1, 2]]


def test_a_memory_in_bfloat16_steps_almost_alike() -> None:
    layout, algorithm = layout_of(3000), MicroAdam(lr=LR, density=1.0, window=4)
    exact = served(algorithm, random_gradients(8, 3000), layout)[-1]
    small = served(algorithm, random_gradients(8, 3000, torch.float32), layout)[-1]
    assert small.ring.values.dtype == torch.bfloat16
    distance = torch.linalg.vector_norm(small.theta - exact.theta) / torch.linalg.vector_norm(exact.theta)
    assert 1e-6 < distance < 4e-3


LINEARS = ((384, 27), (1152, 384), (384, 384), (768, 384), (384, 768), (10, 384))
WIDTHS = [math.prod(shape) for rows, columns in LINEARS for shape in ((rows, columns), (rows,))]


def memory_per_coordinate(algorithm: Any, layout: Layout, device: str) -> float:
    s = algorithm.server_init(torch.zeros(layout.num_coordinates, device=device), layout)
    if device == "cpu":
        g = torch.randn(layout.num_coordinates, generator=torch.Generator().manual_seed(0))
        s = algorithm.server_step(s, Release(g, g[:1]), Round(0, 1.0, 1, layout))
    return num_bytes(s._replace(theta=None)) / layout.num_coordinates


def test_micro_adam_remembers_at_most_1_2_bytes_a_coordinate() -> None:
    """Measured on the tensors after a step for a million coordinates; for ten million counted on tensors without content."""
    small = layout_of(*WIDTHS)
    large = layout_of(*WIDTHS * 8)
    assert small.num_coordinates > 1_000_000
    assert large.num_coordinates > 9_000_000
    measured = memory_per_coordinate(MicroAdam(), small, "cpu")
    assert 1.16 < measured <= 1.2
    assert memory_per_coordinate(MicroAdam(), small, "meta") == measured, "counting is measuring"
    assert 1.16 < memory_per_coordinate(MicroAdam(), large, "meta") <= 1.2
    assert memory_per_coordinate(Adam(), small, "meta") == pytest.approx(8, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"density": 0.0}, "density"),
        ({"density": 1.5}, "density"),
        ({"window": 0}, "window"),
        ({"quant_block": 3}, "quant_block"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.{field}: must .* got {settings[field]}"):
        MicroAdam(**settings).server_init(torch.zeros(4), layout_of(4))


def test_more_coordinates_than_places_can_name_are_refused() -> None:
    with pytest.raises(InputError, match=r"four bytes.*not for 2,147,483,648\. Train fewer"):
        MicroAdam().server_init(torch.zeros(2**31, device="meta"), layout_of(2**31))


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Codes, places and bfloat16 values go through a checkpoint."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(60, 8, generator=random)
    recipe = Recipe(
        Task(nn.Linear(8, 3), iid((x, torch.arange(60) % 3), num_clients=6)),
        MicroAdam(lr=0.01, density=0.2, window=3),
        Gaussian(sigma=1.0, batch_size=5),
        rounds=NUM_ROUNDS + 3,
        local_steps=1,
        cohort=4,
    )
    whole = run(recipe, tmp_path / "whole")
    record, rows = begin(recipe, tmp_path / "halves")
    for _ in range(NUM_ROUNDS):
        next(rows)
    record.close()
    (t, expected), (u, found) = end(whole), end(run(recipe, tmp_path / "halves", resume=True))
    assert t == u == recipe.rounds
    assert {found["s.error.codes"].dtype, found["s.ring.places"].dtype, found["s.ring.values"].dtype} == {
        torch.uint8,
        torch.int32,
        torch.bfloat16,
    }
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def end(record: RunRecord) -> tuple[int, dict[str, Tensor]]:
    stored = record.restore()
    assert stored is not None
    return stored
