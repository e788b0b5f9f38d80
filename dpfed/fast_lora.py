"""LoRA layers that stay fast when every record and every client is mapped over.

    y = x W' + u B',   u = s x A';     dx = g W + v A,   dA = v' x,   dB = g' u,   v = s g B

(Hu et al., 2021, arXiv 2106.09685). Every client has an A and a B of its own, and all share W. Mapped over as it stands, this
becomes a dozen products whose parts are added up afterwards; and A and B are views into a long vector, at places from which
fast kernels cannot read. Here each pass is one operator, ``dpfed::lora`` and ``dpfed::lora_backward``, whose weights are shared
by groups of rows. Its rule for a mapped axis makes rows of it where a weight is the same for all of it, so neither A nor B is
ever copied for a record, and W is multiplied once for the whole cohort. The small product is written first, and the large one
added to it in its own last step. As one operator takes g, a compiler makes it once; for three, it took the backward pass of a
gelu three times. ``with_lora_products`` makes PEFT's layers use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

_FORWARD, _BACKWARD = "dpfed::lora", "dpfed::lora_backward"
_OF_LORA = "Tensor weight, Tensor a, Tensor b, float scale"
_ANY_STRIDES = torch.Tag.flexible_layout  # else a compiler makes what goes in once more for every operator that takes it
torch.library.define(_FORWARD, f"(Tensor x, {_OF_LORA}) -> (Tensor, Tensor)", tags=_ANY_STRIDES)
torch.library.define(
    _BACKWARD,
    f"(Tensor g, Tensor x, Tensor u, {_OF_LORA}, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    tags=_ANY_STRIDES,
)
Triple = tuple[Tensor, Tensor, Tensor]

# Rows come in groups, [G, R, n]. Of the weights [K, m, n] each is for G / K groups that follow one another; K may differ.


def _per_weight(x: Tensor, weight: Tensor) -> Tensor:
    return x.reshape(len(weight), -1, x.shape[-1])


def _aligned(weight: Tensor) -> Tensor:
    """A copy where a row begins elsewhere than at a multiple of 16 bytes: fast kernels read that much at once."""
    step = max(16 // weight.element_size(), 1)
    jumps = [jump for size, jump in zip(weight.shape, weight.stride(), strict=True) if size > 1 and jump > 1]
    aligned = all(place % step == 0 for place in (weight.storage_offset(), *jumps))
    return weight if aligned else weight.clone(memory_format=torch.contiguous_format)


def _product(x: Tensor, weight: Tensor, scale: float = 1.0, y: Tensor | None = None, large: Tensor | None = None) -> Tensor:
    """``scale x weight' + y large'``"""
    out = x.new_empty(*x.shape[:2], weight.shape[1])
    _per_weight(out, weight).baddbmm_(_per_weight(x, weight), _aligned(weight).mT, beta=0, alpha=scale)
    if y is not None and large is not None:
        if len(large) == 1:
            out.flatten(0, 1).addmm_(y.reshape(-1, y.shape[-1]), large[0].t())
        else:
            _per_weight(out, large).baddbmm_(_per_weight(y, large), large.mT)
    return out


@torch.library.impl(_FORWARD, "CompositeExplicitAutograd")
def _lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    u = _product(x, a, scale)
    return _product(u, b, 1.0, x, weight), u


@torch.library.impl(_BACKWARD, "CompositeExplicitAutograd")
def _lora_backward(
    g: Tensor, x: Tensor, u: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, wanted: list[bool]
) -> Triple:
    """``dx``, and ``dA`` and ``dB`` of every group; what is not wanted is empty."""
    for_x, for_a, for_b = wanted
    v = _product(g, b.mT, scale) if for_x or for_a else g
    dx = _product(v, a.mT, 1.0, g, weight.mT) if for_x else g.new_empty(len(g), 0)
    da = torch.bmm(v.mT, x) if for_a else g.new_empty(len(g), 0)
    return dx, da, torch.bmm(g.mT, u) if for_b else g.new_empty(len(g), 0)


def _shapes(x: Tensor, weight: Tensor, a: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:2], weight.shape[1]), x.new_empty(*x.shape[:2], a.shape[1])


def _backward_shapes(
    g: Tensor, x: Tensor, u: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, wanted: list[bool]
) -> Triple:
    shapes = x.shape[1:], a.shape[1:], b.shape[1:]
    return cast(Triple, tuple(g.new_empty(len(g), *(s if yes else (0,))) for s, yes in zip(shapes, wanted, strict=True)))


torch.library.register_fake(_FORWARD, _shapes)
torch.library.register_fake(_BACKWARD, _backward_shapes)


def _mapped(x: Tensor, where: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if where is None else x.movedim(where, 0)


def _for_groups(weight: Tensor, where: int | None, size: int) -> Tensor:
    """A weight when the mapped axis comes before the groups: one that is the same for all rows stays as it is."""
    return weight if where is None and len(weight) == 1 else _mapped(weight, where, size).flatten(0, 1)


def _folding(operator: Callable[..., tuple[Tensor, ...]], num_rows: int, num_tensors: int) -> Callable[..., Any]:
    """A mapped axis becomes groups: inside those of each weight where the weights are the same for all of it, else around."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size, weights = info.batch_size, slice(num_rows, num_tensors)
        within = int(all(where is None for where in in_dims[weights]))
        rows = [
            _mapped(x, at, size).movedim(0, within).flatten(0, 1) for x, at in zip(inputs[:num_rows], in_dims, strict=False)
        ]
        shared = inputs[weights]
        if not within:
            shared = [_for_groups(weight, at, size) for weight, at in zip(shared, in_dims[weights], strict=True)]
        found = operator(*rows, *shared, *inputs[num_tensors:])
        return tuple(out.unflatten(0, (-1, size) if within else (size, -1)) for out in found), (within,) * len(found)

    return rule


torch.library.register_vmap(_FORWARD, _folding(torch.ops.dpfed.lora, 1, 4))
torch.library.register_vmap(_BACKWARD, _folding(torch.ops.dpfed.lora_backward, 3, 6))


def _summed(gradient: Tensor, weight: Tensor) -> Tensor:
    """Of every weight, from that of every group."""
    return gradient if len(gradient) == len(weight) else gradient.unflatten(0, (len(weight), -1)).sum(1)


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch.ops.dpfed.lora(x, weight, a, b, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """An axis that is mapped inside of the gradient becomes rows: what is the same for all of it gets one gradient."""
        (x, *weights, scale), size = inputs, info.batch_size
        rows = in_dims[1:4] == (None, None, None)
        if rows:
            x = _mapped(x, in_dims[0], size).movedim(0, 1).flatten(1, 2)
        else:
            x = _mapped(x, in_dims[0], size).flatten(0, 1)
            weights = [_for_groups(weight, where, size) for weight, where in zip(weights, in_dims[1:4], strict=True)]
        y, u = cast(tuple[Tensor, Tensor], _Lora.apply(x, *weights, scale))
        where = int(rows)
        return (y.unflatten(where, (size, -1)), u.unflatten(where, (size, -1))), (where, where)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, u = ctx.saved_tensors
        g, (for_x, for_weight, for_a, for_b, _) = grads[0], ctx.needs_input_grad
        dx, da, db = torch.ops.dpfed.lora_backward(g, x, u, weight, a, b, ctx.scale, [for_x, for_a, for_b])
        return (
            dx if for_x else None,
            torch.bmm(_per_weight(g, weight).mT, _per_weight(x, weight)) if for_weight else None,
            _summed(da, a) if for_a else None,
            _summed(db, b) if for_b else None,
            None,
        )


def _apply(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return cast(tuple[Tensor, Tensor], _Lora.apply(x, weight, a, b, scale))[0]


def for_dynamo() -> None:
    """The same word for these products as `dpfed.fast.for_dynamo` says for attention."""
    torch.compiler.allow_in_graph(_apply)


def lora(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``x W' + bias + scale (x A') B'`` of rows ``[..., in]``, with W ``[out, in]``, A ``[rank, in]``, B ``[out, rank]``.

    >>> x, weight, a, b = torch.ones(2, 3), torch.eye(3), torch.ones(1, 3), torch.ones(3, 1)
    >>> lora(x, weight, None, a, b, 2.0)[0]
    tensor([7., 7., 7.])
    """
    y = _apply(x.reshape(1, -1, x.shape[-1]), weight.unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0), scale)
    y = y.reshape(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias


class LoraProducts(nn.Module):
    """What stands before PEFT's linear layer of low rank: the same by ``lora``, wherever it is nothing more than that."""

    def forward(self, x: Tensor, *further: Any, **named: Any) -> Tensor:
        parts = None if further or named else _parts(self, x)
        return super().forward(x, *further, **named) if parts is None else lora(x, *parts)


def _parts(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """W, bias, A, B and scale of a layer with one plain adapter that is in use."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.disable_adapters or layer.merged or names[0] in layer.lora_variant:
        return None
    [name], large = names, layer.base_layer
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = all(type(part) is nn.Linear for part in (large, a, b)) and a.bias is None and b.bias is None
    if not plain or getattr(dropout, "p", 0.0) or {w.dtype for w in (large.weight, a.weight, b.weight)} != {x.dtype}:
        return None
    return large.weight, large.bias, a.weight, b.weight, float(layer.scaling[name])


@cache
def _fast(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fast{kind.__name__}", (LoraProducts, kind), {})


def with_lora_products(module: nn.Module) -> nn.Module:
    """The same module, PEFT's linear layers of low rank computed by ``lora`` wherever their large weight is frozen."""
    for part in cast(Any, module.modules()):
        kind = cast(type[nn.Module], type(part))
        if (kind.__module__, kind.__name__) == (
            "peft.tuners.lora.layer",
            "Linear",
        ) and not part.base_layer.weight.requires_grad:
            part.__class__ = _fast(kind)
    return module
