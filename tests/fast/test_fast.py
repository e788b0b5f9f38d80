"""Every fast layer beside the plain one it stands for: the same values and the same per-record gradients, also compiled."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dpfed import fast
from dpfed.compiled import simplify
from dpfed.fast import Products, attention

S, B, T, HEADS, WIDTH = 2, 3, 7, 2, 8
LEARNT = "learnt, for all windows"
Attend = Callable[..., Tensor]


def by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return ((scores if mask is None else scores + mask).softmax(-1) @ v).transpose(1, 2)


def masks(kind: str, dtype: torch.dtype) -> tuple[Tensor | None, tuple[int | None, int | None]]:
    """A mask, and over which of its axes clients and records are mapped."""
    shape, dims = {
        "none": ((), (None, None)),
        "of the model": ((1, HEADS, T, T), (None, None)),
        "of the windows": ((2, 1, T, T), (None, None)),
        "of the record": ((S, B, 1, 1, 1, T), (0, 0)),
        LEARNT: ((S, B, 1, HEADS, T, T), (0, 0)),
    }[kind]
    return None if kind == "none" else torch.randn(shape, dtype=dtype), dims


def per_record(attend: Attend, mask: Tensor | None, dims: tuple[int | None, int | None], causal: bool) -> Callable[..., Tensor]:
    def loss(weight: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x @ weight).unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        return attend(q, k, v, mask, causal=causal).sin().sum()

    mapped = vmap(vmap(grad(loss), in_dims=(None, 0, dims[1])), in_dims=(0, 0, dims[0]))
    return lambda weight, x: mapped(weight, x, mask)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch, about itself
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("kind", "causal"),
    [("none", True), *((kind, False) for kind in ("none", "of the model", "of the windows", "of the record", LEARNT))],
)
def test_gradients_of_records_and_clients(
    kind: str, causal: bool, dtype: torch.dtype, tolerance: float, compiled: bool
) -> None:
    torch.manual_seed(0)
    n = 2 if "windows" in kind else 1
    weight, x = torch.randn(S, 5, 3 * HEADS * WIDTH, dtype=dtype), torch.randn(S, B, n, T, 5, dtype=dtype)
    mask, dims = masks(kind, dtype)
    ours, plain = (per_record(attend, mask, dims, causal) for attend in (attention, by_definition))
    torch.compiler.reset()
    fast.for_dynamo()
    found = torch.compile(ours, fullgraph=True)(weight, x) if compiled else ours(weight, x)
    expected = plain(weight, x)
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert expected.norm() > 0.1


def test_a_learnt_mask_gets_its_gradient() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, 1, T, HEADS, WIDTH, dtype=torch.float64)
    mask = torch.randn(1, HEADS, T, T, dtype=torch.float64)

    def gradient(attend: Attend) -> Tensor:
        return vmap(grad(lambda mask, *rest: attend(*rest, mask).sin().sum()), in_dims=(None, 0, 0, 0))(mask, q, k, v)

    torch.testing.assert_close(gradient(attention), gradient(by_definition), rtol=1e-12, atol=1e-12)


def net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
    second = nn.Tanh(), nn.Conv2d(6, 4, 1, stride=2), nn.Conv2d(4, 3, 2, dilation=2, padding=(2, 1)), nn.Conv2d(3, 4, 2, 2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.LazyLinear(2)).double()


@pytest.mark.parametrize(("num_keys", "width"), [(3, 8), (9, 8), (7, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_another_number_and_values_of_another_width(num_keys: int, width: int, causal: bool) -> None:
    q, k, v = (torch.randn(B, n, HEADS, w, dtype=torch.float64) for n, w in ((T, 8), (num_keys, 8), (num_keys, width)))

    def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("nqhw,nkhw->nhqk", q, k) / math.sqrt(8)
        later = torch.arange(num_keys) > torch.arange(T).unsqueeze(1) if causal else torch.zeros(T, num_keys, dtype=torch.bool)
        return torch.einsum("nhqk,nkhw->nqhw", scores.masked_fill(later, -math.inf).softmax(-1), v)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return grad(lambda *given: function(*given).sin().sum(), argnums=(0, 1, 2))(q, k, v)

    torch.testing.assert_close(attention(q, k, v, causal=causal), plainly(q, k, v))
    for found, expected in zip(gradients(lambda *given: attention(*given, causal=causal)), gradients(plainly), strict=True):
        torch.testing.assert_close(found, expected)


KERNELS = [
    ("cudnn", {}),
    ("cudnn", {"causal": True, "width": 128}),
    ("flash", {"width": 136}),
    ("flash", {"num": 1, "num_keys": 1, "causal": True}),
    ("flash", {"num_keys": 9}),
    ("efficient", {"num_keys": 9, "causal": True}),  # flash would end with the last key
    ("efficient", {"values": 16}),
    ("efficient", {"dtype": torch.float32}),
    ("efficient", {"mask": True}),
    ("plain", {"width": 12, "values": 12}),
    ("plain", {"values": 264}),
    ("plain", {"dtype": torch.float64}),
]


@pytest.mark.parametrize(("kernel", "setting"), KERNELS)
def test_a_fused_kernel_is_asked_only_for_what_it_is_known_to_take(
    monkeypatch: pytest.MonkeyPatch, kernel: str, setting: dict[str, Any]
) -> None:
    monkeypatch.setattr(fast, "_has_cudnn", lambda device: True)
    dtype, width, num = setting.get("dtype", torch.bfloat16), setting.get("width", 64), setting.get("num", 7)
    with FakeTensorMode():
        q, k, v = (
            torch.empty(B, HEADS, n, w, dtype=dtype, device="cuda")
            for n, w in ((num, width), (setting.get("num_keys", 7), width), (7, setting.get("values", width)))
        )
        assert fast._kernel(q, k, v, q if "mask" in setting else None, setting.get("causal", False)) == kernel


def test_convolutions_by_patches_are_convolutions() -> None:
    x = torch.randn(S, B, 1, 2, 9, 11, dtype=torch.float64)
    module = net()
    module(x[0, 0])
    weights = {name: torch.stack([p.detach(), p.detach() * 1.1]) for name, p in module.named_parameters()}

    def gradients(by_patches: bool) -> dict[str, Tensor]:
        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            with Products(weights, (), lambda name, out: out, by_patches):
                return functional_call(module, weights, (x,)).square().sum()

        return vmap(vmap(grad(loss), in_dims=(None, 0)))(weights, x)

    found, expected = gradients(True), gradients(False)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-11, atol=1e-11)


def num_convolutions(layer: nn.Conv2d, by_patches: bool) -> int:
    """Of a layer that is frozen, whose numbers are compared first."""
    x = torch.randn(1, 4, 11, 9, dtype=torch.float64)
    seen = Counter[Any]()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            seen[func] += 1
            return func(*given, **(named or {}))

    with Seen(), Products({}, (), lambda name, out: out, by_patches):
        out = layer(x)
    torch.testing.assert_close(out, layer(x))
    return seen[torch.ops.aten.convolution.default]


def test_a_frozen_convolution_that_cuts_into_tiles_is_a_product() -> None:
    tiles = nn.Conv2d(4, 6, 3, 3), nn.Conv2d(4, 6, (2, 3), (2, 3), bias=False)
    others = nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 3, 3, padding=1), nn.Conv2d(4, 6, 1), nn.Conv2d(4, 6, 2, 2, groups=2)
    others = *others, nn.Conv2d(4, 6, 2, 2, dilation=2)
    assert [num_convolutions(layer.double(), True) for layer in (*tiles, *others)] == [0, 0, 1, 1, 1, 1, 1]
    assert num_convolutions(tiles[0].double(), False) == 1


def test_what_cannot_be_done_by_patches_is_left_alone() -> None:
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    for layer in (
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding_mode="reflect", padding=1),
    ):
        layer = layer.double()
        with Products({"weight": layer.weight}, ["weight"], lambda name, out: torch.zeros_like(out)) as products:
            out = layer(x)
        torch.testing.assert_close(out, layer(x))
        assert [product.kind for product in products.found] == (["convolution"] if layer.padding_mode == "reflect" else [])


def test_a_trace_does_not_rest_on_the_strides_it_saw() -> None:
    """A compiler may lay out what is between differently, say behind a norm."""
    trace = make_fx(lambda x: x.relu().flatten())(torch.randn(3, 4))
    other = torch.randn(4, 3).t()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        trace(other)
    simplify(trace)
    assert trace(other).equal(other.relu().flatten())


def shapes_only(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Axes that are moved to and fro, flattened, split, and lost when they have one entry; a vector changed in place."""
    there = x.movedim(0, 2).unsqueeze(1).flatten(1, 2)
    back = there.unflatten(1, (1, x.shape[2])).squeeze(1).movedim(2, 0)
    alike, ones = back.reshape(x.shape).transpose(1, 2).transpose(2, 1), y.unsqueeze(0).permute(1, 0, 2).squeeze()
    changed = y.flatten().clone()
    view = changed.view(y.shape)
    changed.add_(1)
    return (
        alike.sin(),
        x.transpose(0, 1).contiguous().permute(1, 0, 2).exp(),
        ones.t().cos(),
        view * 2,
        x.flatten().view(x.shape),
    )


def test_a_trace_without_what_only_moves_numbers_gives_the_same() -> None:
    given = torch.randn(2, 3, 4), torch.randn(5, 2)
    trace = make_fx(shapes_only, tracing_mode="fake")(*given)
    before = len(trace.graph.nodes)
    simplify(trace)
    assert len(trace.graph.nodes) < 0.6 * before
    for other in (given, (torch.randn(4, 3, 2).permute(2, 1, 0), torch.randn(2, 5).t())):
        for found, expected in zip(trace(*other), shapes_only(*other), strict=True):
            assert found.equal(expected)


def bits_and_views(x: Tensor) -> tuple[Tensor, ...]:
    """What looks like another shape and is none, and what is changed behind a view of a view."""
    other = (
        x.view(torch.int32),
        x.to(torch.bfloat16).transpose(0, 1).view(torch.int16).transpose(0, 1),
        x.sum().transpose(0, -1),
    )
    held = x.clone()
    whole = held.permute(2, 0, 1).permute(1, 2, 0).view(-1)
    held.split(1, -1)[1].mul_(2)
    torch.ops.aten._foreach_add_.Scalar([held[0].transpose(0, 1)], 1.0)
    before = whole.view(4, 6).exp()
    whole.zero_()
    return *other, before, held + 1


def test_bits_that_are_taken_for_others_and_views_that_change_stay_what_they_are() -> None:
    """A bit cast goes by the name of a view, and one of equal width changes no shape."""
    x = torch.randn(2, 3, 4)
    trace = make_fx(bits_and_views, tracing_mode="fake")(x)
    simplify(trace)
    for found, expected in zip(trace(x), bits_and_views(x), strict=True):
        assert found.dtype == expected.dtype
        assert found.equal(expected)


KEPT = """
import torch
from torch._dynamo.utils import counters
from dpfed.compiled import Compiler
from dpfed.fast_lora import lora
x, weight, a, b = torch.randn(1, 3, 8), torch.randn(8, 8), torch.randn(2, 8), torch.randn(8, 2)
compiler = Compiler()
layer = lambda held: (lora(held["x"], held["w"], None, held["a"], held["b"], 2.0).cos(),)
out, = compiler("layer", layer, {"w": weight}, {"x": x, "a": a, "b": b})
torch.testing.assert_close(out, (x @ weight.T + 2 * x @ a.T @ b.T).cos())
assert not compiler.notes
print(counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_a_program_is_compiled_once_for_all_runs(tmp_path: Path) -> None:
    own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ran = [subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True, env=own) for _ in range(2)]
    assert [int(each.stdout) for each in ran] == [0, 1]
