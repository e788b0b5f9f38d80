"""What an algorithm is: five methods on vectors. And the one loop over local steps.

A federated algorithm in full, as small as one can be::

    @dataclass(frozen=True)
    class FedAvg:
        lr: float = 0.1

        def server_init(self, theta, layout):
            return Weights(theta)

        def client_init(self, s, memory, t):
            return Weights(s.theta)

        def local_step(self, x, s, grad, t, k):
            return Weights(x.theta - self.lr * t.scale * grad(x.theta))

        def upload(self, x, s, memory, t):
            return Delta(x.theta - s.theta), None

        def server_step(self, s, u, t):
            return Weights(s.theta + u.delta)

``Weights`` and ``Delta`` are NamedTuples of vectors; an algorithm that keeps or sends more brings its own. Everything is
written on the last axis: ``s.theta`` may be ``[d]`` or a matrix ``[S, d]`` with one row per client, and a lone number is a
vector of length 1. The algorithm sees no data and no raw gradient, draws no noise, owns no loop, and its uploads are only ever
averaged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from dpfed.errors import InputError
from dpfed.flat import Layout, sent

Tree = Any
"""A NamedTuple of vectors (or of such NamedTuples), or None."""


@dataclass(frozen=True)
class Round:
    """A round as everybody sees it: its number, the schedule's factor on the learning rate, K, and the public map of theta.

    ``shrinkage`` is the sum of the squared weights of the mean: by so much averaging shrinks the variance of independent noise
    (1 / S for equal weights). ``participation`` is the cohort's share of all clients (S / N). ``clip`` is the threshold of
    adaptive clipping; ``public`` names the fields of the upload that no data can change, where whole clients are protected.
    """

    index: int
    scale: float
    num_steps: int
    layout: Layout
    shrinkage: float = 1.0
    participation: float = 1.0
    clip: float | None = None
    public: frozenset[str] = frozenset()


class Weights(NamedTuple):
    """The state of those who keep nothing else: the server of FedAvg, its clients."""

    theta: Tensor


class Delta(NamedTuple):
    """The upload of those who send nothing else."""

    delta: Tensor


class Counted(NamedTuple):
    """An upload under adaptive clipping, and the share of gradients (or uploads) that were within the threshold, less 1/2."""

    upload: Any
    within: Tensor


class Release(NamedTuple):
    """The upload where the server does the stepping: the private gradient of one step, and the variance of its noise."""

    gradient: Tensor
    phi: Tensor


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


def require_one_step(t: Round) -> None:
    """For the centralised algorithms: where the server steps, a client has nothing to take a second step with."""
    if t.num_steps != 1:
        raise InputError(
            f"local_steps: must be 1 for a centralised algorithm, got {t.num_steps}. Its clients upload the gradient of one "
            "step, and the server steps. Set local_steps=1, or take a federated algorithm such as FedAdamW."
        )


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
    named = iter([vectors[name] for name, _ in leaves(tree)])

    def take(_: Tensor) -> Tensor:
        return next(named)

    return tree_map(take, tree)


def num_bytes(tree: Tree) -> int:
    return sum(vector.numel() * vector.element_size() for _, vector in leaves(tree))


def rows(tree: Tree, num_clients: int) -> list[Tree]:
    """A cohort's matrices, client by client. What is the same for all clients may lack the first axis."""

    def matrix(vector: Tensor) -> Tensor:
        return vector.expand(num_clients, vector.shape[-1])

    full = tree_map(matrix, tree)
    return [tree_map(operator.itemgetter(i), full) for i in range(num_clients)]


def weighted_sum(weighted: Iterable[tuple[float, Tree]], start: Tree = None) -> Tree:
    """Sum of weight times upload, strictly in the order given: every engine sums in client order, to the same bits."""
    total = start
    for weight, tree in weighted:
        scaled = tree_map(partial(torch.mul, other=weight), tree)
        total = scaled if total is None else tree_map(torch.add, total, scaled)
    return total


def weighted_rows(weights: Sequence[float], matrices: Tree, start: Tree = None) -> Tree:
    """`weighted_sum` of the rows of a cohort's matrices, to the same bits."""

    def add_up(matrix: Tensor, *total: Tensor) -> Tensor:
        column = sent(torch.tensor(weights, dtype=matrix.dtype), matrix.device).unsqueeze(1)
        first, *rest = [*total, *(matrix * column).unbind()]
        added = first.clone()
        for row in rest:
            added += row
        return added

    return tree_map(add_up, matrices) if start is None else tree_map(add_up, matrices, start)
