"""The optimizers for loops of one's own: equal to the algorithms, without noise equal to torch's, at home in Opacus."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from dpfed import InputError, Layout, algorithms, optim
from dpfed.algorithm import Release, Round
from dpfed.flat import Part

SHAPES = [(5, 4), (7,), (), (3, 2, 2), (1,)]
LAYOUT = Layout(tuple(Part(f"tensor{i}", shape, "weights") for i, shape in enumerate(SHAPES)))

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "eps": 1e-3}),
    ("AdamW", {}),
    ("AdamW", {"eps_inside": True, "eps": 1e-3}),
    ("AdamBC", {}),
    ("AdamBC", {"weight_decay": 0.1, "floor": 0.3, "floor_decay": 0.8, "eps": 1e-3}),
    ("AdamWBC", {}),
    ("AdamWBC", {"weight_decay": 0.1, "floor": 0.3, "floor_decay": 0.8, "eps": 1e-3}),
    ("MicroAdam", {}),
    ("MicroAdam", {"density": 0.3, "window": 3, "quant_block": 4, "weight_decay": 0.1, "bias_correction": "window"}),
    ("MicroAdam", {"density": 0.3, "ef_bits": None}),
]
each_case = pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
each_optimizer = pytest.mark.parametrize("name", ["Adam", "AdamBC", "AdamW", "AdamWBC", "MicroAdam"])


def parameters(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], t: int) -> None:
    random = torch.Generator().manual_seed(100 + t)
    for p in params:
        p.grad = torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype)


def flat(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@each_case
def test_equals_the_algorithm(name: str, settings: dict[str, Any]) -> None:
    """With a learning rate and a noise variance that change from step to step."""
    corrects = name.endswith("BC")
    optimizer = getattr(optim, name)(parameters(), lr=0.05, betas=(0.8, 0.9), **settings)
    params: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    algorithm = getattr(algorithms, name)(lr=0.05, beta1=0.8, beta2=0.9, **settings)
    s = algorithm.server_init(flat(params), LAYOUT)
    for t in range(6):
        scale, phi = 1 - 0.1 * t, 0.2 + 0.1 * t
        give_gradients(params, t)
        u = Release(flat([p.grad for p in params]), s.theta.new_tensor([phi]))
        s = algorithm.server_step(s, u, Round(t, scale, 1, LAYOUT))
        optimizer.param_groups[0]["lr"] = 0.05 * scale
        if corrects:
            optimizer.param_groups[0]["noise_var"] = phi
        optimizer.step()
        assert (flat(params) - s.theta).abs().max() / s.theta.abs().max() < 1e-12
    assert (flat(params) - flat(parameters())).abs().min() > 0 or name == "MicroAdam"


@pytest.mark.parametrize(
    ("name", "settings", "by_torch"),
    [
        ("Adam", {}, torch.optim.Adam),
        ("AdamBC", {"noise_var": 0.0, "floor": 0.0, "eps": 1e-8}, torch.optim.Adam),
        ("AdamW", {}, torch.optim.AdamW),
        ("AdamWBC", {"noise_var": 0.0, "floor": 0.0, "eps": 1e-8}, torch.optim.AdamW),
        ("MicroAdam", {"density": 1.0, "window": 8, "ef_bits": None}, torch.optim.AdamW),
    ],
)
def test_without_noise_equals_torch(name: str, settings: dict[str, Any], by_torch: type[Any]) -> None:
    """Two groups of their own settings, and a schedule over both."""
    trained: list[Tensor] = []
    for make, own in ((getattr(optim, name), settings), (by_torch, {})):
        params = parameters()
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.2, "weight_decay": 0.3}]
        optimizer = make(groups, lr=0.05, betas=(0.8, 0.95), weight_decay=0.1, **own)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        for t in range(8):
            give_gradients(params, t)
            optimizer.step()
            schedule.step()
        trained.append(flat(params))
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-12, atol=1e-13)


def test_a_schedule_that_cycles_the_betas_is_followed() -> None:
    optimizer = optim.AdamW(parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    before = optimizer.param_groups[0]["betas"]
    give_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["betas"] != before
    optimizer.step()


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_stored_state_continues_in_the_same_bits(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    make = getattr(optim, name)
    whole, first, second = parameters(dtype), parameters(dtype), parameters(dtype, seed=1)
    one, two, three = (make(params, lr=0.05, **settings) for params in (whole, first, second))
    for t in range(5):
        give_gradients(whole, t)
        one.step()
        if t < 3:
            give_gradients(first, t)
            two.step()
    file = io.BytesIO()
    torch.save({"optimizer": two.state_dict(), "params": first}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    three.load_state_dict(stored["optimizer"])
    for p, value in zip(second, stored["params"], strict=True):
        p.data = value.data.clone()
    for t in range(3, 5):
        give_gradients(second, t)
        three.step()
    for a, b in zip(whole, second, strict=True):
        assert a.equal(b)
        assert one.state[a].keys() == three.state[b].keys()
        assert {key: getattr(v, "dtype", type(v)) for key, v in one.state[a].items()} == {
            key: getattr(v, "dtype", type(v)) for key, v in three.state[b].items()
        }


def test_a_loaded_state_is_a_copy() -> None:
    """Where torch would have turned the places of a half-precision tensor into halves, they stay whole numbers."""
    optimizer = optim.MicroAdam(parameters(torch.bfloat16), density=0.3)
    give_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
    other = optim.MicroAdam(parameters(torch.bfloat16), density=0.3)
    other.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert theirs["ring.places"].dtype == torch.int32
        assert theirs["ring.places"].equal(mine["ring.places"])
        assert theirs["ring.places"].data_ptr() != mine["ring.places"].data_ptr()


@each_optimizer
def test_a_closure_gives_the_loss(name: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = getattr(optim, name)(model.parameters(), lr=0.05)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.step() is None


@each_optimizer
def test_a_parameter_without_gradient_rests_and_begins_when_it_gets_one(name: str) -> None:
    optimizer = getattr(optim, name)(parameters(), lr=0.05)
    params: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    start = params[0].detach().clone()
    for t in range(3):
        give_gradients(params, t)
        params[0].grad = None
        optimizer.step()
    assert params[0].equal(start)
    assert params[0] not in optimizer.state
    alone = nn.Parameter(start.clone())
    give_gradients(params, 3)
    alone.grad = params[0].grad
    optimizer.step()
    getattr(optim, name)([alone], lr=0.05).step()
    torch.testing.assert_close(params[0], alone, rtol=1e-15, atol=0)


@each_optimizer
def test_memory_order_and_emptiness_do_not_matter(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    values, gradient = torch.randn(2, 2, 3, 4, 5, generator=random)
    plain, last = nn.Parameter(values.clone()), nn.Parameter(values.clone(memory_format=torch.channels_last))
    plain.grad, last.grad = gradient.clone(), gradient.clone(memory_format=torch.channels_last)
    empty = nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    getattr(optim, name)([plain, empty, last], lr=0.05).step()
    assert plain.equal(last)
    assert not plain.equal(values)


def test_micro_adam_is_frugal() -> None:
    p = nn.Parameter(torch.zeros(1000, 1000))
    p.grad = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    optimizer = optim.MicroAdam([p])
    optimizer.step()
    held = sum(value.numel() * value.element_size() for value in optimizer.state[p].values() if isinstance(value, Tensor))
    assert 1.16 < held / p.numel() < 1.2


# Inside Opacus, for real.


@each_optimizer
def test_in_opacus_it_steps_with_the_private_gradients(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    # Opacus' hooks would like the input to have a gradient, too.
    x, y = torch.randn(12, 4, generator=random, dtype=torch.float64, requires_grad=True), torch.arange(12) % 3
    model = GradSampleModule(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    sigma, clip, batch_size = 0.7, 0.5, 12
    noise_var = (sigma * clip / batch_size) ** 2
    own = {"noise_var": noise_var, "floor": 1e-5} if name.endswith("BC") else {}
    fields = {"floor": 1e-5} if own else {}
    optimizer = DPOptimizer(
        getattr(optim, name)(model.parameters(), lr=0.05, **own),
        noise_multiplier=sigma,
        max_grad_norm=clip,
        expected_batch_size=batch_size,
        generator=torch.Generator().manual_seed(1),
    )
    params = list(model.parameters())
    layout = Layout(tuple(Part(str(i), tuple(p.shape), "weights") for i, p in enumerate(params)))
    algorithm = getattr(algorithms, name)(lr=0.05, **fields)
    s = algorithm.server_init(flat(params), layout)
    for t in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        u = Release(flat([p.grad for p in params]), s.theta.new_tensor([noise_var]))
        s = algorithm.server_step(s, u, Round(t, 1.0, 1, layout))
        assert (flat(params) - s.theta).abs().max() / s.theta.abs().max() < 1e-12
    stored = optimizer.state_dict()
    optimizer.load_state_dict(stored)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_noise_var_is_the_variance_that_opacus_adds() -> None:
    """Records whose gradient is zero: what is left in p.grad is noise, 20,000 coordinates of it."""
    model = GradSampleModule(nn.Linear(200, 100, bias=False))
    sigma, clip, batch_size = 2.0, 0.5, 16
    optimizer = DPOptimizer(
        optim.AdamBC(model.parameters()),
        noise_multiplier=sigma,
        max_grad_norm=clip,
        expected_batch_size=batch_size,
        generator=torch.Generator().manual_seed(1),
    )
    model(torch.zeros(16, 200, requires_grad=True)).sum().backward()
    optimizer.step()
    [p] = model.parameters()
    assert p.grad is not None
    noise_var = (sigma * clip / batch_size) ** 2
    assert float(p.grad.square().mean()) == pytest.approx(noise_var, rel=5 * math.sqrt(2 / 20_000))


# What cannot be used is said in words.


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Adam", {"lr": -1.0}, "lr: must not be negative, got -1.0"),
        ("Adam", {"lr": math.nan}, "lr: must not be negative, got nan"),
        ("AdamW", {"eps": -1e-8}, "eps: must not be negative"),
        ("AdamW", {"weight_decay": -0.1}, "weight_decay: must not be negative"),
        ("AdamBC", {"noise_var": -1.0}, "noise_var: must not be negative"),
        ("AdamWBC", {"floor": -1.0}, "floor: must not be negative"),
        ("Adam", {"betas": (0.9, 1.0)}, "betas: both must be at least 0 and below 1"),
        ("Adam", {"noise_var": 0.1}, "noise_var: Adam has no such setting. It has: betas, lr"),
        ("MicroAdam", {"density": 0.0}, "density: must lie above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        getattr(optim, name)(parameters(), **settings)


def test_a_group_is_checked_like_the_defaults() -> None:
    params = parameters()
    optimizer = optim.AdamBC(params[:1])
    with pytest.raises(InputError, match="lr: must not be negative"):
        optimizer.add_param_group({"params": params[1:], "lr": -0.1})
    assert len(optimizer.param_groups) == 1


@each_optimizer
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_gradients_that_are_no_private_gradients_are_refused(name: str, kind: str) -> None:
    if kind == "sparse":
        model = nn.Embedding(5, 3, sparse=True)
        model(torch.tensor([1, 2])).sum().backward()
        params = list(model.parameters())
    else:
        params = [nn.Parameter(torch.ones(3, dtype=torch.complex64))]
        params[0].grad = torch.ones(3, dtype=torch.complex64)
    before = params[0].detach().clone()
    with pytest.raises(InputError, match="gradient: must be dense and real"):
        getattr(optim, name)(params).step()
    assert params[0].equal(before)
