"""The kernels equal the plain text: error and ring to the bit, parameters to the rounding. On a GPU or in an interpreter."""

from __future__ import annotations

import ctypes
import io
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpfed import Layout, MicroAdam, optim, pieces
from dpfed.algorithm import Release, Round, leaves
from dpfed.algorithms import micro_adam
from dpfed.flat import Part
from dpfed.pieces import dequantise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and "triton" in sys.modules:
    pytest.skip("triton was imported for a GPU before; run this file alone", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="torch brings triton along for GPUs only")
    from dpfed import kernels

pytestmark = pytest.mark.usefixtures("interpreted")
Draw = Callable[[int, int], Tensor]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, in chunks so small that little of them is empty."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(kernels, "CHUNK", 512)
        monkeypatch.setattr(kernels, "STRETCH", 1024)


@pytest.fixture
def lowest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain text takes the first places, too, where magnitudes are equal."""

    def top(x: Tensor, sizes: list[int], density: float) -> Tensor:
        found = [
            piece.abs().argsort(descending=True, stable=True)[: pieces.num_kept(len(piece), density)]
            for piece in x.split(sizes)
        ]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return torch.cat([places.sort().values + start for places, start in zip(found, starts, strict=True)])

    monkeypatch.setattr(pieces, "_top", top)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are taken on a CPU, too."""
    for module in (micro_adam, optim):
        monkeypatch.setattr(module, "has_kernels", lambda ef_bits, *_: ef_bits is not None)


def normal(t: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(t))


def of_few(t: int, size: int) -> Tensor:
    """Large in a few places next to one another, tiny elsewhere: most groups have none of the top."""
    return normal(t, size) * torch.where(torch.arange(size) < 90, 1e3, 1e-3)


def layout_of(sizes: list[int]) -> Layout:
    return Layout(tuple(Part(str(i), (size,), "weights") for i, size in enumerate(sizes)))


CASES: list[tuple[list[int], dict[str, Any], Draw]] = [
    ([1200, 7, 1, 130, 512], {"window": 3}, normal),
    ([1025, 64, 65, 63], {"window": 2, "density": 0.05, "weight_decay": 0.3}, normal),
    ([1300, 130], {"density": 0.05, "bias_correction": "window", "window": 2}, lambda t, size: normal(t, size).round()),
    ([600, 130], {}, lambda t, size: torch.zeros(size)),
    ([600, 130], {}, lambda t, size: torch.full((size,), -0.5)),
    ([2000], {"density": 0.02}, of_few),
    ([1025], {"density": 0.0001}, normal),
    ([700, 3], {"density": 1.0, "quant_block": 16}, normal),
    ([700, 300], {"density": 0.3, "quant_block": 256, "window": 1}, normal),
    ([1100], {"density": 0.6, "quant_block": 512}, normal),
    ([700], {"eps": 1e-30}, lambda t, size: 1e-18 * normal(t, size)),
    ([700], {}, lambda t, size: 1e12 * normal(t, size)),
]


@pytest.mark.parametrize(("sizes", "settings", "draw"), CASES)
@pytest.mark.usefixtures("lowest_first", "everywhere")
def test_a_step_equals_the_plain_text(sizes: list[int], settings: dict[str, Any], draw: Draw) -> None:
    algorithm, layout = MicroAdam(lr=0.1, **settings), layout_of(sizes)
    plain = fast = algorithm.server_init(normal(99, sum(sizes)), layout)
    fast = type(fast)(*(pieces_to(tree) for tree in fast))
    for t in range(3):
        gradient, number = draw(t, sum(sizes)), Round(t, 1 - 0.1 * t, 1, layout)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(micro_adam, "has_kernels", lambda *_: False)
            plain = algorithm.server_step(plain, Release(gradient, gradient[:1]), number)
        before = {name: vector.clone() for name, vector in leaves(fast)}
        stepped = algorithm.server_step(fast, Release(gradient.to(DEVICE), gradient[:1]), number)
        assert all(vector.equal(before[name]) for name, vector in leaves(fast)), "what is given stays what it is"
        fast = stepped
        assert plain.ring.places.equal(fast.ring.places.cpu())
        assert plain.ring.values.equal(fast.ring.values.cpu())
        assert plain.error.low.equal(fast.error.low.cpu())
        assert plain.error.high.equal(fast.error.high.cpu())
        left = [dequantise(e, sizes, algorithm.quant_block, torch.float32).cpu() for e in (plain.error, fast.error)]
        torch.testing.assert_close(left[0], left[1], rtol=1e-6, atol=0)
        torch.testing.assert_close(plain.theta, fast.theta.cpu(), rtol=1e-6, atol=1e-6)


def pieces_to(tree: Any) -> Any:
    return tree.to(DEVICE) if isinstance(tree, Tensor) else type(tree)(*(vector.to(DEVICE) for vector in tree))


@pytest.mark.usefixtures("lowest_first", "everywhere")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, which quantises it in the GPU's place
@pytest.mark.parametrize("num_lost", [3, 40])
def test_what_is_not_a_number_is_not_lost(num_lost: int) -> None:
    """Fewer than the top, and more: then it stays in the error."""
    sizes, algorithm = [1500, 200], MicroAdam()
    gradient = normal(0, 1700)
    gradient[torch.randperm(1500, generator=torch.Generator().manual_seed(0))[:num_lost]] = math.nan
    states = []
    for with_kernels in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(micro_adam, "has_kernels", lambda *_, answer=with_kernels: answer)
            s = algorithm.server_init(torch.zeros(1700), layout_of(sizes))
            s = type(s)(*(pieces_to(tree) for tree in s)) if with_kernels else s
            given = gradient.to(DEVICE if with_kernels else "cpu")
            states.append(algorithm.server_step(s, Release(given, given[:1]), Round(0, 1.0, 1, layout_of(sizes))))
    plain, fast = states
    for one, other in ((plain.error.low, fast.error.low), (plain.error.high, fast.error.high), (plain.theta, fast.theta)):
        torch.testing.assert_close(one, other.cpu(), equal_nan=True, rtol=1e-6, atol=1e-6)
    assert bool(plain.error.low.isnan().any()) == (num_lost > 15)
    assert int(fast.theta.isnan().sum()) == min(num_lost, 15)


# The optimizer, whose tensors lie wherever they like.

SHAPES = [(20, 40), (9,), (), (3, 2, 2), (1,), (0, 3)]


def parameters(seed: int = 0, device: str = DEVICE) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=random).to(device)) for shape in SHAPES]
    last = torch.randn(2, 3, 4, 5, generator=random).to(device)
    odd = torch.randn(40, generator=random).to(device)[1:]  # begins 4 bytes behind what is aligned
    return [*params, nn.Parameter(last.contiguous(memory_format=torch.channels_last)), nn.Parameter(odd)]


def give_gradients(params: list[nn.Parameter], t: int) -> None:
    random = torch.Generator().manual_seed(100 + t)
    for number, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=random).to(p.device)
        p.grad = None if number == t % 3 and t > 1 else gradient


def flat(params: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().cpu().reshape(-1) for p in params])


def only_where_dense(ef_bits: Any, block: int, tensors: list[Tensor]) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def stepped(steps: range, params: list[nn.Parameter], optimizer: optim.MicroAdam) -> None:
    for t in steps:
        give_gradients(params, t)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + t)
        optimizer.step()


SETTINGS = {"density": 0.02, "window": 3, "weight_decay": 0.1}


def test_the_optimizer_equals_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tensors lack a gradient now and then, one is not aligned, one lies in another order, one is empty."""
    ended: list[Tensor] = []
    remembered: list[dict[str, Any]] = []
    for chosen, device in ((lambda *_: False, "cpu"), (only_where_dense, DEVICE)):
        monkeypatch.setattr(optim, "has_kernels", chosen)
        monkeypatch.setattr(micro_adam, "has_kernels", lambda *_: False)
        params = parameters(device=device)
        optimizer = optim.MicroAdam(params, **SETTINGS)
        stepped(range(6), params, optimizer)
        ended.append(flat(params))
        remembered.append(optimizer.state_dict()["state"])
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-5, atol=1e-6)
    assert not ended[0].equal(flat(parameters()))
    for one, other in zip(remembered[0].values(), remembered[1].values(), strict=True):
        assert one.keys() == other.keys()
        assert one["step"] == other["step"]
        assert all(one[name].equal(other[name].cpu()) for name in ("ring.places", "ring.values", "error.low", "error.high"))


class Compiling:
    """A kernel that hands out what it was compiled to, as Triton's do on a GPU. That knows nothing but addresses."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.num_direct = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compiled(*given: Any, **options: Any) -> Any:
            kinds = [x.dtype if isinstance(x, Tensor) else None for x in given]
            self.kernel[grid](*given, **options)
            return Compiled(self, kinds)

        return compiled


class Compiled:
    def __init__(self, source: Compiling, kinds: list[torch.dtype | None]) -> None:
        self.source, self.kinds = source, kinds

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*given: Any, stream: int) -> None:
            assert len(grid) == 3
            assert stream == 7
            self.source.num_direct += 1
            self.source.kernel[grid](*map(self.first_at, given, self.kinds))

        return start

    def first_at(self, given: Any, kind: torch.dtype | None) -> Any:
        if kind is None:
            return given
        assert isinstance(given, int)
        return torch.frombuffer((ctypes.c_char * kind.itemsize).from_address(given), dtype=kind)


@pytest.mark.skipif(DEVICE == "cuda", reason="there every test takes them from the second step on")
def test_compiled_kernels_are_started_in_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that finds what an earlier one has compiled, of other tensors, too."""
    monkeypatch.setattr(optim, "has_kernels", only_where_dense)
    monkeypatch.setattr(micro_adam, "has_kernels", lambda *_: False)
    ended: list[Tensor] = []
    sources: list[Compiling] = []
    for direct in (False, True):
        if direct:
            for name in ("_survey", "_gather", "_count", "_move", "_quantise", "_update"):
                sources.append(Compiling(getattr(kernels, name)))
                monkeypatch.setattr(kernels, name, sources[-1])
            monkeypatch.setattr(kernels, "_PROGRAMS", dict[Any, Any]())
            monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
        params = parameters()
        stepped(range(5), params, optim.MicroAdam(params, **SETTINGS))
        ended.append(flat(params))
    assert ended[0].equal(ended[1])
    number = sources[0].num_direct
    assert number > 0
    assert [source.num_direct for source in sources] == [number, number, 4 * number, number, number, number]


def test_a_stored_state_continues_in_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "has_kernels", only_where_dense)
    monkeypatch.setattr(micro_adam, "has_kernels", lambda *_: False)
    whole, first, second = parameters(), parameters(), parameters(seed=1)
    one, two, three = (optim.MicroAdam(params, **SETTINGS) for params in (whole, first, second))
    stepped(range(6), whole, one)
    stepped(range(3), first, two)
    file = io.BytesIO()
    torch.save({"optimizer": two.state_dict(), "params": first}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    three.load_state_dict(stored["optimizer"])
    for p, value in zip(second, stored["params"], strict=True):
        p.data.copy_(value.data)
    stepped(range(3, 6), second, three)
    assert flat(whole).equal(flat(second))
    for p, q in zip(whole, second, strict=True):
        assert all(torch.as_tensor(one.state[p][name]).equal(torch.as_tensor(three.state[q][name])) for name in one.state[p])


def test_between_steps_only_the_state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors that the optimizer and the module of the kernels can reach: 1.2 bytes a coordinate and some plans."""
    monkeypatch.setattr(optim, "has_kernels", only_where_dense)
    p = nn.Parameter(torch.zeros(60, 80, device=DEVICE))
    p.grad = normal(0, p.numel()).view_as(p).to(DEVICE)
    optimizer, version = optim.MicroAdam([p]), p._version
    optimizer.step()
    optimizer.step()
    assert p._version == version + 2
    [(s, views)] = optimizer.__dict__["_remembered"].values()
    held = sum(vector.numel() * vector.element_size() for _, vector in leaves(s))
    seen = sum(value.numel() * value.element_size() for value in optimizer.state[p].values() if isinstance(value, Tensor))
    assert held == seen
    assert 1.16 < held / p.numel() < 1.2
    assert views[0] is optimizer.state[p]["ring.places"]
    assert views[0].data_ptr() == s.ring.places.data_ptr()
