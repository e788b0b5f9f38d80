"""LoRA layers that stay fast when every record and every client is mapped over.

    y = x W' + s (x A') B',     dx = g W + v A,     dA = v' x,     dB = g' u,       with  u = s x A'  and  v = s g B

(Hu et al., 2021, arXiv 2106.09685). Every client has an A and a B of its own, and all share W. Mapped over as it stands, this
becomes a dozen products whose parts are added up afterwards; and A and B are views into a long vector, at places from which
fast kernels cannot read. Here the four products that give rows are one operator, ``dpfed::product``: a sum of two products
whose weights are shared by groups of rows. Its rule for a mapped axis makes rows of it where a weight is the same for all of
it, so neither A nor B is ever copied for a record, and W is multiplied once for the whole cohort. The first product is written,
and the second, larger one added to it in its own last step. ``with_lora_products`` makes PEFT's layers use it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

_PRODUCT = "dpfed::product"
torch.library.define(_PRODUCT, "(Tensor x, Tensor weight, float scale, Tensor? y, Tensor? fixed) -> Tensor")

# Rows come in groups, [G, R, n]. Of the weights [K, m, n] each is for G / K groups that follow one another; K may differ.


def _per_weight(x: Tensor, weight: Tensor) -> Tensor:
    return x.reshape(len(weight), -1, x.shape[-1])


def _aligned(weight: Tensor) -> Tensor:
    """A copy where a row begins elsewhere than at a multiple of 16 bytes: fast kernels read that much at once."""
    step = max(16 // weight.element_size(), 1)
    jumps = [jump for size, jump in zip(weight.shape, weight.stride(), strict=True) if size > 1 and jump > 1]
    aligned = all(place % step == 0 for place in (weight.storage_offset(), *jumps))
    return weight if aligned else weight.clone(memory_format=torch.contiguous_format)


@torch.library.impl(_PRODUCT, "CompositeExplicitAutograd")
def _product(x: Tensor, weight: Tensor, scale: float, y: Tensor | None, fixed: Tensor | None) -> Tensor:
    """``scale x weight' + y fixed'``"""
    out = x.new_empty(*x.shape[:2], weight.shape[1])
    _per_weight(out, weight).baddbmm_(_per_weight(x, weight), _aligned(weight).mT, beta=0, alpha=scale)
    if y is not None and fixed is not None:
        if len(fixed) == 1:
            out.flatten(0, 1).addmm_(y.reshape(-1, y.shape[-1]), fixed[0].t())
        else:
            _per_weight(out, fixed).baddbmm_(_per_weight(y, fixed), fixed.mT)
    return out


def _shape(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:2], weight.shape[1])


def _mapped(x: Tensor, where: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if where is None else x.movedim(where, 0)


def _for_groups(weight: Tensor, where: int | None, size: int) -> Tensor:
    """A weight when the mapped axis comes before the groups: one that is the same for all rows stays as it is."""
    return weight if where is None and len(weight) == 1 else _mapped(weight, where, size).flatten(0, 1)


def _folded(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    scale: float,
    y: Tensor | None,
    fixed: Tensor | None,
) -> tuple[Tensor, int]:
    """A mapped axis becomes groups: inside those of each weight where the weights are the same for all of it, else around."""
    size = info.batch_size
    within = int(in_dims[1] is None and in_dims[4] is None)

    def groups(rows: Tensor, where: int | None) -> Tensor:
        return _mapped(rows, where, size).movedim(0, within).flatten(0, 1)

    if not within:
        weight = _for_groups(weight, in_dims[1], size)
        fixed = None if fixed is None else _for_groups(fixed, in_dims[4], size)
    out = torch.ops.dpfed.product(groups(x, in_dims[0]), weight, scale, None if y is None else groups(y, in_dims[3]), fixed)
    return out.unflatten(0, (-1, size) if within else (size, -1)), within


torch.library.register_fake(_PRODUCT, _shape)
torch.library.register_vmap(_PRODUCT, _folded)


def _of_weight(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a weight from that of what came out, ``[K, m, n]``."""
    return torch.bmm(_per_weight(g, weight).mT, _per_weight(x, weight))


class _Lora(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        u = torch.ops.dpfed.product(x, a, scale, None, None)
        return torch.ops.dpfed.product(u, b, 1.0, x, weight), u

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
        v = torch.ops.dpfed.product(g, b.mT, ctx.scale, None, None) if for_x or for_a else None
        return (
            torch.ops.dpfed.product(v, a.mT, 1.0, g, weight.mT) if for_x else None,
            _of_weight(g, x, weight) if for_weight else None,
            _of_weight(cast(Tensor, v), x, a) if for_a else None,
            _of_weight(g, u, b) if for_b else None,
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
    y = y.reshape(*x.shape[:-1], -1)
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
