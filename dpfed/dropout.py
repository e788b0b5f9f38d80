"""Dropout from a record's own key: a record's masks do not depend on who is trained beside it, nor in which order.

A module is trained in evaluation mode, with nothing switched on but its dropouts. Inside ``drawing(key)`` every dropout layer
takes numbers of the key, call after call the next stream; outside they pass everything on. That holds for torch's own layers,
for the attention of `dpfed.fast`, and for layers that drop a whole residual branch. A mask is public randomness: it bounds
nothing and costs nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from dpfed.errors import InputError
from dpfed.keyed import uniform


class _Drawing(threading.local):
    key: Tensor | None = None
    count: int = 0


_now = _Drawing()


@contextmanager
def drawing(key: Tensor | None) -> Generator[None]:
    """Within, dropouts are active and draw from the key; without a key they are not."""
    before = _now.key, _now.count
    _now.key, _now.count = key, 0
    try:
        yield
    finally:
        _now.key, _now.count = before


def is_drawing() -> bool:
    return _now.key is not None


def dropped(x: Tensor, p: float, num_shared: int = 0) -> Tensor:
    """Every entry zero with probability ``p``, the others larger by 1 / (1 - p). The last ``num_shared`` axes share one coin.

    >>> with drawing(torch.tensor(7)):
    ...     dropped(torch.ones(6), 0.5).tolist(), dropped(torch.ones(6), 0.5).tolist()
    ([2.0, 2.0, 2.0, 2.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0, 2.0, 2.0])
    >>> dropped(torch.ones(3), 0.5)
    tensor([1., 1., 1.])
    """
    if _now.key is None or not p:
        return x
    _now.count += 1
    shape = (*x.shape[: x.dim() - num_shared], *(1,) * num_shared)
    keep = uniform(_now.key, math.prod(shape), _now.count).reshape(shape) >= p
    return torch.where(keep, x / (1 - p) if p < 1 else 0 * x, 0)


def with_keyed_dropout(module: nn.Module) -> bool:
    """Make the module's dropouts draw from a key, in place; whether it has any. What cannot is refused."""
    rates = [0.0]
    for name, part in module.named_modules():
        rate, where = _rate(part), f"model: layer '{name}' ({type(part).__name__})"
        if rate and _num_shared(part) is None and not _attends(part):
            raise InputError(
                f"{where} drops out with p={rate} in a way that cannot be keyed by record. Set it to 0, and put "
                "torch.nn.Dropout layers beside it if it is needed."
            )
        if rate and _attends(part) and cast(Any, part).config._attn_implementation != "dpfed":
            raise InputError(
                f"{where} drops out with p={rate}, and only the library's own attention does so by record. Call "
                "dpfed.fast.register(), load the model with attn_implementation='dpfed', or set its attention dropout to 0."
            )
        if rate and _num_shared(part) is not None and not isinstance(part, _Keyed):
            part.__class__ = _keyed(type(part))
        rates.append(rate)
    return max(rates) > 0


def attention_rate(part: nn.Module) -> float:
    """The rate at which an attention of transformers drops out, as its families write it."""
    names = ("attention_dropout", "dropout_prob", "dropout")
    rate = next((getattr(part, name) for name in names if hasattr(part, name)), 0.0)
    return float(getattr(rate, "p", rate))


class _Keyed(nn.Module):
    """Stands before the layer's own class: what it does is its own, except while somebody draws."""

    def forward(self, x: Tensor) -> Tensor:
        num_shared = _num_shared(self)
        assert num_shared is not None
        return super().forward(x) if _now.key is None else dropped(x, _rate(self), min(num_shared, x.dim() - 1))


@cache
def _keyed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Keyed{kind.__name__}", (_Keyed, kind), {})


def _attends(part: nn.Module) -> bool:
    """Whether this is an attention of transformers, which asks the attention interface to drop out for it."""
    return "Attention" in type(part).__name__ and hasattr(getattr(part, "config", None), "_attn_implementation")


def _rate(part: nn.Module) -> float:
    if isinstance(part, nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
        return part.p
    if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
        return part.dropout
    if _attends(part):
        return attention_rate(part)
    return float(getattr(part, "drop_prob", None) or 0.0)


def _num_shared(part: nn.Module) -> int | None:
    """How many of the last axes of its input share a coin: none, a channel's, all of a record's; None: it cannot be keyed."""
    channels = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
    found = [num for kind, num in channels.items() if isinstance(part, kind)]
    return found[0] if found else 99 if "DropPath" in type(part).__name__ else None
