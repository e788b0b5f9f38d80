"""Functions of tensors that run eagerly, or as programs that are compiled once for every shape and every model of one kind.

A program is the function's trace: operations on tensors and nothing else, so whatever Python a model is made of runs once.
It is kept for the whole process under a key that says all that the trace may depend on; ``anatomy`` gives that of a model, and
models of the same anatomy share their programs. Where there is no compiler, or it fails, the function itself runs, and a note
says so.
"""

from __future__ import annotations

import logging
import operator
import sys
import sysconfig
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

Held = Mapping[str, Tensor]
Inputs = Mapping[str, Tensor | float]
Outputs = tuple[Tensor, ...]
Function = Callable[[Inputs], Outputs]
Program = Callable[[list[Tensor]], Outputs]
Run = Callable[[Hashable, Function, Held, Inputs], Outputs]

_PROGRAMS: dict[Hashable, Program | str] = {}
_NUMBERS: dict[Hashable, int] = {}


def number_of(key: Hashable) -> int:
    """The same number for equal keys, in this process: a long key is then looked at once, and not at every step."""
    return _NUMBERS.setdefault(key, len(_NUMBERS))


def directly(key: Hashable, function: Function, held: Held, inputs: Inputs) -> Outputs:
    return function({**held, **inputs})


@dataclass(eq=False)
class Compiler:
    """Runs functions as compiled programs, on a GPU with ``graphs`` as one launch instead of hundreds.

    ``backend``: of torch.compile; eager leaves the trace as it is: the same operations one by one, to the same bits.
    ``patience``: a function is run as it is for so many calls of the same shapes, so that what is soon over waits for nothing.
    ``seconds`` went into making ``num_programs`` programs; ``notes`` say what did not work.
    """

    backend: str = "inductor"
    graphs: bool = False
    patience: int = 0
    seconds: float = 0.0
    num_programs: int = 0
    notes: list[str] = field(default_factory=list[str])
    _graphs: dict[Hashable, Program] = field(default_factory=dict[Hashable, Program], repr=False)
    _calls: Counter[Hashable] = field(default_factory=Counter[Hashable], repr=False)
    _shapes: dict[int, tuple[Held, int]] = field(default_factory=dict[int, tuple[Held, int]], repr=False)

    def __call__(self, key: Hashable, function: Function, held: Held, inputs: Inputs) -> Outputs:
        """``function(held | inputs)``. What it computes depends on nothing else but what is in the key.

        ``held``: tensors that stay where they are from call to call, such as frozen weights.
        """
        device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
        tensors = [
            value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)
            for value in inputs.values()
        ]
        if self.backend != "eager":  # where the same operations see the same strides, they round alike
            tensors = [x.contiguous() for x in tensors]
        if id(held) not in self._shapes:  # which is kept, so that nobody else gets its place
            self._shapes[id(held)] = held, number_of(tuple((name, x.shape, x.dtype) for name, x in held.items()))
        shapes = tuple((name, x.shape, x.dtype) for name, x in zip(inputs, tensors, strict=True))
        whole = (key, self._shapes[id(held)][1], shapes, device, self.backend)
        program, fixed = _PROGRAMS.get(whole), list(held.values())
        if program is None and self._calls[whole] < self.patience:
            self._calls[whole] += 1
            return function({**held, **inputs})
        with torch.no_grad():
            if program is None:
                began = time.monotonic()
                program = _PROGRAMS[whole] = self._program(function, [*held, *inputs], fixed + tensors)
                self.seconds, self.num_programs = self.seconds + time.monotonic() - began, self.num_programs + 1
            if isinstance(program, str):
                self._note(program)
                return function({**held, **inputs})
            if self.graphs and device.type == "cuda":
                return self._graph((whole, id(held)), program, fixed, tensors)(tensors)
            return program(fixed + tensors)

    def _program(self, function: Function, names: list[str], tensors: list[Tensor]) -> Program | str:
        def of_tensors(*tensors: Tensor) -> Outputs:
            return function(dict(zip(names, tensors, strict=True)))

        tensors = [x.detach() for x in tensors]  # a trace takes two inputs that are one tensor here for one input
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler, about itself
                from torch.fx.experimental.proxy_tensor import make_fx

                trace = make_fx(of_tensors, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
                simplify(trace)
                compiled = self._compiled(trace, tensors)
                compiled(*tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler fails at, the function itself can be run
            return f"it runs uncompiled, because the compiler failed: {_first_line(error)}"
        return lambda tensors: tuple(compiled(*tensors))

    def _compiled(self, trace: Any, tensors: list[Tensor]) -> Callable[..., Iterable[Tensor]]:
        if self.backend == "eager":
            return _from_outside(trace, tensors)
        from torch._dynamo.backends.registry import lookup_backend  # it takes a second, and not everybody compiles
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        known = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # else inductor keeps nothing between runs
        with tracing(TracingContext(known)):
            fake = [known.from_tensor(tensor, static_shapes=True) for tensor in tensors]
            return cast(Any, lookup_backend(self.backend))(trace, fake)

    def _graph(self, key: Hashable, program: Program, fixed: list[Tensor], tensors: list[Tensor]) -> Program:
        if key not in self._graphs:
            began = time.monotonic()
            try:
                self._graphs[key] = _graphed(program, fixed, tensors)
            except RuntimeError as error:
                self._note(f"it runs without CUDA graphs: {_first_line(error)}")
                self._graphs[key] = lambda tensors: program(fixed + tensors)
            self.seconds += time.monotonic() - began
        return self._graphs[key]

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


_ATEN = torch.ops.aten
_RESHAPES = {  # not aten.view.dtype, which takes the bits for other numbers
    *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.alias.default, _ATEN.unsqueeze.default),
    *(_ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
}


def simplify(trace: torch.fx.GraphModule) -> None:
    """Of what only gives numbers another shape, no more than the same takes: half of a trace is that, and a compiler's time
    goes by the number of operations. And no view stays: a compiler may give what is computed other strides than the trace
    saw, and what was a view then has to be copied."""
    calls = [node for node in trace.graph.nodes if node.op == "call_function"]
    changed = {_root(written) for node in calls for written in _written(node)}
    for node in calls:
        source, order = _source(node), _permutation(node)
        if source is None or _root(node) in changed or (order is None and node.target not in _RESHAPES):
            continue
        shape, before = tuple(node.meta["val"].shape), source.meta["val"].shape
        further = _source(source)
        if order is not None and source.target == _ATEN.permute.default and further is not None:
            order, source, before = [cast(Any, source.args[1])[axis] for axis in order], further, further.meta["val"].shape
        moved = [] if order is None else [axis for axis in order if before[axis] != 1]
        if moved != sorted(moved):
            _replace(node, _ATEN.permute.default, source, cast(list[int], order))
            continue
        if source.target == _ATEN.reshape.default and further is not None and source is node.args[0]:
            source, before = further, further.meta["val"].shape
        if tuple(before) == shape:
            node.replace_all_uses_with(source)
        else:
            _replace(node, _ATEN.reshape.default, source, list(shape))
    trace.graph.eliminate_dead_code()
    trace.recompile()


def _source(node: torch.fx.Node) -> torch.fx.Node | None:
    """What it is made of first, if both are tensors."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    known = isinstance(source, torch.fx.Node) and all(isinstance(n.meta.get("val"), Tensor) for n in (node, source))
    return cast(torch.fx.Node, source) if known else None


def _replace(node: torch.fx.Node, target: Any, source: torch.fx.Node, how: list[int]) -> None:
    with node.graph.inserting_before(node):
        other = node.graph.call_function(target, (source, how))
    other.meta = node.meta
    node.replace_all_uses_with(other)


def _written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What it changes in place."""
    slots: Any = getattr(getattr(node.target, "_schema", None), "arguments", ())
    given = dict(zip((slot.name for slot in slots), node.args, strict=False)) | node.kwargs
    values = [given.get(slot.name) for slot in slots if slot.alias_info is not None and slot.alias_info.is_write]
    each = [x for value in values for x in (cast(list[Any], value) if isinstance(value, list | tuple) else [value])]
    return [x for x in each if isinstance(x, torch.fx.Node)]


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """Whose memory it may be a view of: followed through operators that say so, and out of lists."""
    while node.op == "call_function" and node.all_input_nodes:
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if node.target is not operator.getitem and all(out.alias_info is None for out in returns):
            break
        node = node.all_input_nodes[0]
    return node


def _permutation(node: torch.fx.Node) -> list[int] | None:
    """Of the axes of what goes in; None for whatever is not one."""
    if node.target not in (_ATEN.permute.default, _ATEN.transpose.int):
        return None
    axes, asked = list(range(node.meta["val"].dim())), cast(Any, node.args[1:])
    if node.target == _ATEN.permute.default:
        return [axes[place] for place in asked[0]]
    if axes:  # a number has none, and still may be transposed
        axes[asked[0]], axes[asked[1]] = axes[asked[1]], axes[asked[0]]
    return axes


def _from_outside(trace: torch.fx.GraphModule, tensors: list[Tensor]) -> Callable[..., Iterable[Tensor]]:
    """The same operations in the same order, called by TorchScript, which takes a third of the time that Python does."""
    try:
        script: Any = torch.jit.trace(trace, tuple(tensors), check_trace=False)
    except RuntimeError:  # a few it cannot write down, such as the gradient of a convolution
        return trace

    def call(*tensors: Tensor) -> Iterable[Tensor]:
        with cast(Any, torch.jit).optimized_execution(False):  # which would add up products in another order
            return script(*tensors)

    return call


@contextmanager
def narrow_products(on: bool) -> Generator[None]:
    """On a GPU, products of float32 matrices take numbers of 11 bits and add in float32: exact for what was bfloat16. Where not
    on, they take all bits, whatever else was chosen in this process: norms, and with them the clip, rest on it."""
    products = torch.backends.cuda.matmul
    try:
        name, before, wanted = "allow_tf32", products.allow_tf32, on
    except RuntimeError:  # PyTorch has two settings for the same, and refuses to read one where the other was written
        name, before, wanted = "fp32_precision", products.fp32_precision, "tf32" if on else "ieee"
    setattr(products, name, wanted)
    try:
        yield
    finally:
        setattr(products, name, before)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _graphed(program: Program, fixed: list[Tensor], tensors: list[Tensor]) -> Program:
    """The program as a CUDA graph. What comes out is overwritten by the next call, so it is handed out as a copy."""
    stream, static = torch.cuda.Stream(), [tensor.clone() for tensor in tensors]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            program(fixed + static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = program(fixed + static)

    def replay(tensors: list[Tensor]) -> Outputs:
        for place, now in zip(static, tensors, strict=True):
            place.copy_(now)
        graph.replay()
        return tuple(out.clone() for out in outputs)

    return replay


class _Only:
    """Something of which nothing is known but that it is itself. It is kept, so that nobody else gets its place."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Only) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def anatomy(value: Any, given: Iterable[Tensor] = ()) -> Hashable:
    """What a model, a function or a setting is made of besides the numbers in tensors that are ``given`` to a program.

    Two values of equal anatomy compute the same of the same tensors. What is not known to be equal counts as different. Code
    that is installed is taken to stay as it is; of one's own, the globals and attributes of classes it names count, too.

    >>> one, other, further = (torch.nn.Linear(3, 2, bias=bias) for bias in (True, True, False))
    >>> anatomy(one, one.parameters()) == anatomy(other, other.parameters()) != anatomy(further, further.parameters())
    True
    """
    return _anatomy(value, {id(x): (number, tuple(x.shape), x.dtype) for number, x in enumerate(given)}, {})


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _anatomy(value: Any, given: dict[int, Hashable], seen: dict[int, tuple[int, Any]]) -> Hashable:
    if value is None or type(value) in _PLAIN:
        return type(value), repr(value) if isinstance(value, float | complex) else value  # which tells 0 from -0
    if isinstance(value, Tensor) and id(value) in given:
        return "given", given[id(value)]
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType | Enum | Tensor):
        return _Only(value)
    if isinstance(value, type) and _is_installed(value.__module__):
        return _Only(value)
    if id(value) in seen:
        return "seen", seen[id(value)][0]
    seen[id(value)] = len(seen), value  # which is kept while others are looked at, so that none of them gets its place

    def inside(*parts: Any) -> Hashable:
        return type(value), *(_anatomy(part, given, seen) for part in parts)

    if isinstance(value, type):
        return _Only(value), inside(*value.__bases__, *vars(value).items())
    kind, attributes = type(value), getattr(value, "__dict__", {})
    slots = [_slot(value, slot) for slot in _slots(kind)]
    further = (attributes, slots) if attributes or slots else ()  # numbers, texts and what holds others may have some, too
    if isinstance(value, _PLAIN):
        return repr(value), inside(*further)
    if isinstance(value, list | tuple):
        return inside(*further, *cast(list[Any], value))
    if isinstance(value, set | frozenset):
        names = frozenset((type(name), name) for name in cast(set[Any], value))
        return (names, inside(*further)) if all(of in (str, int, bool) for of, _ in names) else _Only(value)
    if isinstance(value, dict):
        fields = cast(dict[Any, Any], value)
        return inside(*further, *fields.keys(), *fields.values())
    if isinstance(value, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        names = () if _is_installed(value.__module__) else sorted(_names(value.__code__) & value.__globals__.keys())
        outside = [(name, value.__globals__[name]) for name in names]
        return (
            value.__code__,
            _Only(value.__globals__),
            inside(attributes, value.__defaults__, value.__kwdefaults__, cells, outside),
        )
    if isinstance(value, types.MethodType):
        return inside(value.__func__, value.__self__)
    if isinstance(value, staticmethod | classmethod):
        return inside(cast(Any, value).__func__)
    if isinstance(value, property):
        return inside(value.fget)
    if isinstance(value, partial):
        return inside(value.func, value.args, value.keywords)
    known = hasattr(value, "__dict__") or (slots and all("__slots__" in vars(parent) for parent in kind.__mro__[:-1]))
    plain = known and kind.__new__ is object.__new__ and not isinstance(value, logging.Logger)
    return inside(kind, *further) if plain else _Only(value)


@cache
def _slots(kind: type) -> list[types.MemberDescriptorType]:
    return [x for parent in kind.__mro__ for x in vars(parent).values() if isinstance(x, types.MemberDescriptorType)]


def _slot(value: Any, slot: types.MemberDescriptorType) -> tuple[Any, ...]:
    """What a slot holds, if anything, and whose slot it is. Nothing is run for it."""
    try:
        return slot.__objclass__, slot.__name__, slot.__get__(value, type(value))
    except AttributeError:
        return slot.__objclass__, slot.__name__


@cache
def _is_installed(module: str) -> bool:
    """Whether it is Python's own or lies where packages do; not what somebody is writing."""
    file = getattr(sys.modules.get(module), "__file__", None)
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return module.partition(".")[0] in (*sys.stdlib_module_names, *sys.builtin_module_names, "torch", __package__) or (
        file is not None and any(Path(file).is_relative_to(place) for place in places)
    )


def _names(code: types.CodeType) -> set[str]:
    """What a function and those inside of it may take from outside."""
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, types.CodeType)))
