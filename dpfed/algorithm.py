"""What an algorithm is: five methods on vectors. And the one loop over local steps.

A federated algorithm in full, as small as one can be::

    @dataclass(frozen=True)
    class FedAvg:
        lr: float = 0.1

        def server_init(self, theta, layout):
            return Server(theta)

        def client_init(self, s, memory, t):
            return Local(s.theta)

        def local_step(self, x, s, grad, t, k):
            return Local(x.theta - self.lr * t.scale * grad(x.theta))

        def upload(self, x, s, memory, t):
            return Upload(x.theta - s.theta), None

        def server_step(self, s, u, t):
            return Server(s.theta + u.delta)

``Server``, ``Local`` and ``Upload`` are NamedTuples of vectors. Everything is written on the last axis: ``s.theta`` may be
``[d]`` or a matrix ``[S, d]`` with one row per client, and a lone number is a vector of length 1. The algorithm sees no data and
no raw gradient, draws no noise, owns no loop, and its uploads are only ever averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from dpfed.flat import Layout

Tree = Any
"""A NamedTuple of vectors (or of such NamedTuples), or None."""


class Round(NamedTuple):
    """A round as everybody sees it: its number, the schedule's factor on the learning rate, K, and the public map of theta.

    ``shrinkage`` is the sum of the squared weights of the mean: by so much averaging shrinks the variance of independent noise
    (1 / S for equal weights).
    """

    index: int
    scale: float
    num_steps: int
    layout: Layout
    shrinkage: float = 1.0


class Gradient(Protocol):
    """The private gradient of one local step, and the public variance of its noise."""

    noise_var: Tensor

    def __call__(self, theta: Tensor, *, draw: int = 0, minus: tuple[float, Tensor] | None = None) -> Tensor: ...


class Algorithm(Protocol):
    """The five methods. ``memory`` stays on the client and is None until it first takes part."""

    def server_init(self, theta: Tensor, layout: Layout) -> Any: ...
    def client_init(self, s: Any, memory: Any, t: Round) -> Any: ...
    def local_step(self, x: Any, s: Any, grad: Gradient, t: Round, k: int) -> Any: ...
    def upload(self, x: Any, s: Any, memory: Any, t: Round) -> tuple[Any, Any]: ...
    def server_step(self, s: Any, u: Any, t: Round) -> Any: ...


def client_round(
    algorithm: Algorithm, s: Tree, memory: Tree, gradient: Callable[[int], Gradient], t: Round
) -> tuple[Tree, Tree]:
    """The local steps of one round: of one client, or of a whole cohort as a matrix."""
    x = algorithm.client_init(s, memory, t)
    for k in range(t.num_steps):
        x = algorithm.local_step(x, s, gradient(k), t, k)
    return algorithm.upload(x, s, memory, t)


def tree_map(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """The same structure with ``function`` applied to its vectors."""
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return function(tree, *others)
    return type(tree)(*(tree_map(function, *fields) for fields in zip(tree, *others, strict=True)))


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The vectors of a tree with their dotted names, for transport and checkpoints."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif tree is not None:
        for name, field in zip(cast(Sequence[str], tree._fields), tree, strict=True):
            yield from leaves(field, f"{path}.{name}" if path else name)


def like(tree: Tree, vectors: dict[str, Tensor]) -> Tree:
    """The inverse of ``leaves``: the structure of ``tree`` with the named vectors."""
    names = iter([name for name, _ in leaves(tree)])
    return tree_map(lambda _: vectors[next(names)], tree)


def num_bytes(tree: Tree) -> int:
    return sum(vector.numel() * vector.element_size() for _, vector in leaves(tree))


def rows(tree: Tree, num_clients: int) -> list[Tree]:
    """A cohort's matrices, client by client. What is the same for all clients may lack the first axis."""

    def row(i: int) -> Tree:
        return tree_map(lambda x: x.expand(num_clients, x.shape[-1])[i], tree)

    return [row(i) for i in range(num_clients)]


def weighted_sum(weighted: Iterable[tuple[float, Tree]], start: Tree = None) -> Tree:
    """Sum of weight times upload, strictly in the order given: every engine sums in client order, to the same bits."""
    total = start
    for weight, tree in weighted:
        scaled = tree_map(lambda x, w=weight: w * x, tree)
        total = scaled if total is None else tree_map(torch.add, total, scaled)
    return total
