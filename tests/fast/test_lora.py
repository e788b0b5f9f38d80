"""LoRA's operator beside the layer that it stands for: the same numbers, mapped over in every way, with no more products."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from dpfed import fast_lora
from dpfed.fast_lora import lora, with_lora_products

S, B, T, IN, OUT, RANK, SCALE = 2, 3, 5, 16, 24, 8, 1.5
Layer = Callable[..., Tensor]


def by_definition(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    y = x @ weight.T + scale * ((x @ a.T) @ b.T)
    return y if bias is None else y + bias


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows [S, B, 1, T, in], W and its bias, and A and B of each client as views into long vectors, at an odd place."""
    torch.manual_seed(0)
    x = torch.randn(S, B, 1, T, IN, dtype=dtype)
    weight, bias = torch.randn(OUT, IN, dtype=dtype) / 4, torch.randn(OUT, dtype=dtype)
    long = torch.randn(S, 3 + RANK * (IN + OUT), dtype=dtype) / 4
    _, a, b = long.split([3, RANK * IN, RANK * OUT], dim=1)
    return x, weight, bias, a.view(S, RANK, IN), b.view(S, OUT, RANK)


def twice(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Two layers, so that the gradient of what goes into one matters."""
    inner = layer(x, weight, bias, a, b, SCALE).sin() @ weight
    return layer(inner, weight, None, a, b, SCALE).cos().sum()


def per_record(layer: Layer, *argnums: int) -> Callable[..., tuple[Tensor, ...]]:
    def loss(a: Tensor, b: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return twice(layer, x, weight, bias, a, b)

    inner = vmap(grad(loss, argnums=argnums), in_dims=(None, None, 0, None, None))
    outer = vmap(inner, in_dims=(0, 0, 0, None, None))
    return lambda x, weight, bias, a, b: outer(a, b, x, weight, bias)


def plain_sum(layer: Layer) -> Callable[..., tuple[Tensor, ...]]:
    def total(a: Tensor, b: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return vmap(lambda row: twice(layer, row, weight, bias, a, b))(x).sum()

    outer = vmap(grad(total, argnums=(0, 1)), in_dims=(0, 0, 0, None, None))
    return lambda x, weight, bias, a, b: outer(a, b, x, weight, bias)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()
        assert other.norm() > 0.1


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch, about itself
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("private", [True, False])
def test_gradients_of_records_and_clients(private: bool, dtype: torch.dtype, tolerance: float, compiled: bool) -> None:
    given = inputs(dtype)
    ours, plain = ((per_record(layer, 0, 1) if private else plain_sum(layer)) for layer in (lora, by_definition))
    torch.compiler.reset()
    fast_lora.for_dynamo()
    found = (torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours)(*given)
    close(found, plain(*(x.double() for x in given)), tolerance)


@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (0, 1, 2, 3, 4), (3,)])
def test_every_gradient_by_itself(argnums: tuple[int, ...]) -> None:
    """With A frozen (FFA-LoRA) or B, only that of the rows, or the large weight's as well."""
    given = inputs(torch.float64)
    close(per_record(lora, *argnums)(*given), per_record(by_definition, *argnums)(*given), 1e-12)


@pytest.mark.parametrize("outer", list(product([True, False], repeat=4)))
@pytest.mark.parametrize("inner", [(True, False, False, False), (False, True, True, False), (True, True, False, True)])
def test_every_combination_of_mapped_inputs(outer: tuple[bool, ...], inner: tuple[bool, ...]) -> None:
    """Two mapped axes, of 2 and of 3, inside and outside of the gradient; which inputs have them is any of all combinations."""
    torch.manual_seed(0)
    shapes = (1, T, IN), (OUT, IN), (RANK, IN), (OUT, RANK)
    mapped = list(zip(shapes, outer, inner, strict=True))
    given = [torch.randn(*(2,) * out, *(3,) * within, *shape, dtype=torch.float64) / 3 for shape, out, within in mapped]
    dims = [tuple(0 if yes else None for yes in some) for some in (outer, inner)]

    def outcome(layer: Layer, gradient_outside: bool) -> tuple[Tensor, ...]:
        def loss(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return layer(x, weight, None, a, b, SCALE).sin().sum()

        def within(function: Callable[..., Any]) -> Callable[..., Any]:
            return vmap(function, in_dims=dims[1])

        def whole(*some: Tensor) -> Tensor:
            return within(loss)(*some).sum()

        every = (0, 1, 2, 3)
        found = grad(whole, argnums=every) if gradient_outside else within(grad(loss, argnums=every))
        return (vmap(found, in_dims=dims[0]) if any(outer) else found)(*given)

    for gradient_outside in (False, True):
        close(outcome(lora, gradient_outside), outcome(by_definition, gradient_outside), 1e-12)


class Products(TorchDispatchMode):
    """The shapes of what the operators are given."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[tuple[tuple[int, ...], ...]] = []
        self.backward: list[tuple[tuple[int, ...], ...]] = []
        self.biggest = 0

    def __torch_dispatch__(self, func: Any, types: Any, given: tuple[Any, ...] = (), named: Any = None) -> Any:
        out = func(*given, **(named or {}))
        if func in (torch.ops.dpfed.lora.default, torch.ops.dpfed.lora_backward.default):
            shapes = tuple(tuple(x.shape) for x in given if isinstance(x, Tensor))
            (self.forward if func is torch.ops.dpfed.lora.default else self.backward).append(shapes)
        elif func is torch.ops.aten.clone.default or func is torch.ops.aten.copy_.default:
            self.biggest = max(self.biggest, out.numel())
        return out


def test_no_rows_are_rows_too() -> None:
    x, weight, a, b = torch.zeros(0, 5, 6), torch.randn(7, 6), torch.randn(2, 6), torch.randn(7, 2)
    assert lora(x, weight, torch.ones(7), a, b, 2.0).shape == (0, 5, 7)
    assert grad(lambda a: lora(x, weight, None, a, b, 2.0).sum())(a).equal(torch.zeros(2, 6))


def test_weights_are_not_copied_for_records() -> None:
    x, weight, bias, a, b = inputs(torch.float64)

    def loss(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return lora(x.sin() * a.sum(), weight, bias, a, b, SCALE).cos().sum()

    own = (S, RANK, IN), (S, OUT, RANK)
    with Products() as seen:
        vmap(vmap(grad(loss, argnums=(0, 1)), in_dims=(None, None, 0)))(a, b, x)
    assert seen.forward == [((S, B * T, IN), (1, OUT, IN), *own)]  # W once for the cohort, A and B once a client
    assert seen.backward == [((S * B, T, OUT), (S * B, T, IN), (S * B, T, RANK), (1, OUT, IN), *own)]
    assert seen.biggest == 0

    def total(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return vmap(lambda row: loss(a, b, row))(x).sum()

    with Products() as seen:
        vmap(grad(total, argnums=(0, 1)))(a, b, x)
    assert seen.backward == [((S, B * T, OUT), (S, B * T, IN), (S, B * T, RANK), (1, OUT, IN), *own)]


def test_what_is_not_a_number_does_not_come_from_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(torch.bfloat16)
    expected = per_record(lora, 0, 1)(*given)
    monkeypatch.setattr(Tensor, "new_empty", lambda x, *shape: x.new_full(shape, torch.nan))
    close(per_record(lora, 0, 1)(*given), expected, 1e-6)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(IN, OUT), nn.Linear(OUT, IN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def adapted(**setting: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=4, init_lora_weights=False, **{"target_modules": ["first", "second"]} | setting)
    return peft.get_peft_model(Two().double(), config).eval()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(S, B, 1, T, IN, dtype=torch.float64)
    weights = {n: torch.stack([p.detach(), p.detach() * 1.1]) for n, p in module.named_parameters() if p.requires_grad}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, weights, (x,)).sin().sum()

    return vmap(vmap(grad(loss), in_dims=(None, 0)))(weights, x)


def num_fast(module: nn.Module) -> int:
    with Products() as seen:
        module(torch.randn(1, T, IN, dtype=torch.float64))
    return len(seen.forward)


def test_layers_of_peft() -> None:
    plain, ours = adapted(), with_lora_products(adapted())
    assert (num_fast(plain), num_fast(ours)) == (0, 2)
    found, expected = gradients(ours), gradients(plain)
    assert found.keys() == expected.keys()
    assert len(found) == 4
    close(tuple(found.values()), tuple(expected[name] for name in found), 1e-12)
    x = torch.randn(1, T, IN, dtype=torch.float64)
    merged = ours.merge_and_unload()
    assert type(merged.first) is nn.Linear
    close((merged(x),), (plain(x),), 1e-12)


def changed(change: str) -> Any:
    settings = {
        "dropout": {"lora_dropout": 0.5},
        "weight-decomposed": {"use_dora": True},
        "bias of B": {"lora_bias": True, "target_modules": ["first"]},
    }
    module = adapted(**settings.get(change, {}))
    if change == "trained":
        module.base_model.model.first.base_layer.weight.requires_grad_(True)
        module.base_model.model.second.base_layer.weight.requires_grad_(True)
    ours = with_lora_products(module)
    if change == "disabled":
        module.base_model.disable_adapter_layers()
    elif change == "merged":
        module.merge_adapter()
    elif change == "two adapters":
        module.add_adapter("other", module.peft_config["default"])
        module.base_model.set_adapter(["default", "other"])
    elif change == "narrow":
        for part in (module.base_model.model.first, module.base_model.model.second):
            part.lora_A.float(), part.lora_B.float()
    return ours


@pytest.mark.parametrize(
    "change",
    ["dropout", "weight-decomposed", "bias of B", "trained", "disabled", "merged", "two adapters", "narrow"],
)
def test_whatever_is_more_than_plain_lora_is_left_to_peft(change: str) -> None:
    assert num_fast(changed(change)) == 0
