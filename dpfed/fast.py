"""Layers that stay fast when every record and every client is mapped over, and products that are seen through.

``vmap(vmap(grad(loss)))`` turns a model into one program for a whole cohort. Two kinds of layers lose by it: fused attention
kernels have no rule for mapped axes and run one record after the other, and a convolution whose weights differ from client
to client becomes a grouped one. Here attention is an operator whose rule folds the mapped axes into the batch, forward and
backward, and a convolution is a matrix product of its patches. Both compute what the layers they stand for compute.

``Products`` watches a forward pass for the products of rows with a weight, out = x W'. The gradient of W for one record is then
g' x, where g is the gradient of what comes out; the two factors are often far smaller than their product.

    softmax(scale q k' + mask) v,      with  d mask = P * (dO v' - sum(dO * O)),  P = exp(scale q k' + mask - lse)

(the backward pass of Dao et al., FlashAttention, 2022, arXiv 2205.14135). Needed by name in transformers' attention interface:
``register()``, then ``attn_implementation="dpfed"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dpfed.dropout import attention_rate, dropped, is_drawing

aten = torch.ops.aten
Triple = tuple[Tensor, Tensor, Tensor]

# Heads stand before the last axis, [N, T, heads, width], as the layers around attention have them: nothing is ever copied.

_FORWARD, _BACKWARD = "dpfed::attention", "dpfed::attention_backward"
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal"
_ANY_STRIDES = torch.Tag.flexible_layout  # else a compiler makes what goes in once more for every operator that takes it
torch.library.define(_FORWARD, f"({_INPUTS}) -> (Tensor, Tensor)", tags=_ANY_STRIDES)
torch.library.define(_BACKWARD, f"(Tensor g, Tensor out, Tensor lse, {_INPUTS}) -> (Tensor, Tensor, Tensor)", tags=_ANY_STRIDES)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple((x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in tensors)


def _heads_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in tensors)


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> str:
    """The fused kernel for these inputs, heads first; ``plain`` where none takes them.

    Flash attention has what is causal end with the last key, and wants values as wide as keys. cuDNN's kernels differ between
    its versions in whether they take wide heads, single tokens and keys of another number.
    """
    if q.device.type == "cpu":
        return "cpu" if v.shape[-1] == q.shape[-1] else "plain"
    half, width, alike = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1], q.shape[2] == k.shape[2]
    kinds = half or q.dtype == torch.float32
    if q.device.type != "cuda" or not kinds or width % 8 or v.shape[-1] % 8 or max(width, v.shape[-1]) > 256:
        return "plain"
    if not half or mask is not None or v.shape[-1] != width or (causal and not alike):
        return "efficient"
    return "cudnn" if alike and q.shape[2] > 1 and width <= 128 and _has_cudnn(q.device) else "flash"


@cache
def _has_cudnn(device: torch.device) -> bool:
    """Its kernels for GPUs of Hopper's generation and later take 0.7 of the time of flash attention's (benchmarks/NOTES.md)."""
    return torch.cuda.get_device_capability(device) >= (9, 0) and (torch.backends.cudnn.version() or 0) >= 91000


def _bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as the efficient kernel wants it: rows that begin at a multiple of 16, the rest by strides."""
    if mask is None:
        return None
    aligned = functional.pad(mask.to(q.dtype), (0, -k.shape[2] % 16))[..., : k.shape[2]]
    return aligned.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(_wide(q)) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores if mask is None else scores + mask


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


@torch.library.impl(_FORWARD, "CompositeExplicitAutograd")
def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = _heads_first(q, k, v)
    kernel = _kernel(q, k, v, mask, causal)
    if kernel == "cpu":
        narrow = None if mask is None else mask.to(q.dtype)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=narrow, scale=scale)
    elif kernel == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    elif kernel == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        lse = lse.reshape(q.shape[:3])
    elif kernel == "efficient":
        bias = _bias(q, k, mask)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
        lse = lse[..., : q.shape[2]]
    else:
        scores = _scores(q, k, mask, scale, causal)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v
    return _heads_last(out)[0], lse.contiguous()


@torch.library.impl(_BACKWARD, "CompositeExplicitAutograd")
def _attention_backward(
    g: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
) -> Triple:
    g, out, q, k, v = _heads_first(g, out, q, k, v)
    kernel = _kernel(q, k, v, mask, causal)
    if kernel == "cpu":
        narrow, run = None if mask is None else mask.to(q.dtype), aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = run(g, q, k, v, out, lse, 0.0, causal, attn_mask=narrow, scale=scale)
    elif kernel == "flash":
        run, (n, m) = aten._scaled_dot_product_flash_attention_backward, (q.shape[2], k.shape[2])
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
        found = run(g, q, k, v, out, lse, None, None, n, m, 0.0, causal, unused, unused[0], scale=scale)
    elif kernel == "cudnn":
        run, (n, m) = aten._scaled_dot_product_cudnn_attention_backward, (q.shape[2], k.shape[2])
        unused = torch.empty((), dtype=torch.long, device=q.device)
        found = run(g, q, k, v, out, lse.unsqueeze(-1), unused, unused, None, None, None, n, m, 0.0, causal, scale=scale)
    elif kernel == "efficient":
        lse = functional.pad(lse, (0, -q.shape[2] % 32), value=math.inf)
        bias, run = _bias(q, k, mask), aten._scaled_dot_product_efficient_attention_backward
        unused, wanted = torch.empty((), dtype=torch.long, device=q.device), [True, True, True, False]
        found = run(g, q, k, v, bias, out, lse, unused, unused, 0.0, wanted, causal, scale=scale)[:3]
    else:
        weights = (_scores(q, k, mask, scale, causal) - lse.unsqueeze(-1)).exp()
        inner = (weights * ((g @ v.transpose(-1, -2)) - (g * out).sum(-1, keepdim=True)) * scale).to(q.dtype)
        found = inner @ k, inner.transpose(-1, -2) @ q, weights.to(g.dtype).transpose(-1, -2) @ g
    return cast(Triple, _heads_last(*found))


def _shape(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    n, length, heads, _ = q.shape
    return q.new_empty(n, length, heads, v.shape[-1]), q.new_empty(n, heads, length, dtype=_wide(q))


def _shapes(g: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Triple:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


torch.library.register_fake(_FORWARD, _shape)
torch.library.register_fake(_BACKWARD, _shapes)


def _folding(operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """The rule for a mapped axis: it becomes part of the batch. What is the same for all of it is spread by strides."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def fold(value: Any, where: int | None) -> Any:
            if not isinstance(value, Tensor) or (where is None and value.shape[0] == 1 and value is inputs[mask]):
                return value
            whole = value.expand(info.batch_size, *value.shape) if where is None else value.movedim(where, 0)
            if value is inputs[mask]:  # a learnt one is the same for all of a record's windows
                whole = whole.expand(-1, num, *whole.shape[2:])
            return whole.reshape(-1, *whole.shape[2:])

        mask = len(inputs) - 3
        num = inputs[mask - 3].shape[0 if in_dims[mask - 3] != 0 else 1]
        found = operator(*map(fold, inputs, in_dims))
        return tuple(out.unflatten(0, (info.batch_size, -1)) for out in found), (0,) * len(found)

    return rule


torch.library.register_vmap(_FORWARD, _folding(torch.ops.dpfed.attention))
torch.library.register_vmap(_BACKWARD, _folding(torch.ops.dpfed.attention_backward))


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True  # both passes are made of operators that have rules

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return torch.ops.dpfed.attention(q, k, v, mask, scale, causal)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scale, ctx.causal = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, mask = ctx.saved_tensors
        g = grads[0]
        found = torch.ops.dpfed.attention_backward(g, out, lse, q, k, v, mask, ctx.scale, ctx.causal)
        return *found, _of_mask(ctx, g) if ctx.needs_input_grad[3] else None, None, None


def _of_mask(ctx: Any, g: Tensor) -> Tensor:
    """For a mask that is learnt, such as a bias by relative position: the only case that sees the whole matrix of weights."""
    out, lse, q, k, v, mask = ctx.saved_tensors
    g, out, q, k, v = _heads_first(g, out, q, k, v)
    weights = (_scores(q, k, mask, ctx.scale, ctx.causal) - lse.unsqueeze(-1)).exp()
    inner = weights * (g @ v.transpose(-1, -2) - (g * out).sum(-1, keepdim=True))
    return inner.sum_to_size(mask.shape).to(mask.dtype)


def _apply(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return cast(Tensor, _Attention.apply(q, k, v, mask, scale, causal)[0])  # pyright: ignore[reportOptionalSubscript]


def for_dynamo() -> None:
    """For a ``torch.compile`` of one's own: attention is then taken as the operator that it is. A simulation compiles traces,
    and needs no such word; as dynamo takes seconds to import, it is not said before somebody asks for it."""
    torch.compiler.allow_in_graph(_apply)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float | None = None, causal: bool = False
) -> Tensor:
    """``softmax(scale q k' + mask) v`` of ``[N, T, heads, width]``; the mask is added and broadcasts to ``[N, heads, T, T]``.

    >>> q = torch.ones(1, 2, 1, 8)
    >>> attention(q, q, torch.arange(16.0).reshape(1, 2, 1, 8))[0, :, 0, 0]
    tensor([4., 4.])
    """
    return _apply(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale, causal)


def hugging_face_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """``attention`` as transformers calls it. With dropout it sees the whole matrix of weights, and is slower."""
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = query.new_zeros(()).masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query.shape[2] > 1
    if is_drawing() and (p := attention_rate(module)):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        weights = dropped(_scores(query, key, attention_mask, scale, causal).softmax(-1), p).to(value.dtype)
        return (weights @ value).transpose(1, 2).contiguous(), None
    q, k, v = _heads_first(query, key, value)
    return attention(q, k, v, attention_mask, scale=scaling, causal=causal), None


def hugging_face_mask(make: Callable[..., Tensor], **asked: Any) -> Tensor | None:
    """What transformers adds to the scores: nothing where all is seen, or all but what comes later. No number is looked at for
    that, only what is asked for: so it is the same when records are mapped over and when it is compiled."""
    length, local = asked["kv_length"], asked.get("local_size")
    if asked.get("attention_mask") is None and (local is None or length < local):
        causal = asked.get("allow_is_causal_skip", True) and asked["q_length"] == length
        if causal or asked.get("allow_is_bidirectional_skip", False):
            return None
    return make(**asked | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def register() -> None:
    """Make ``attn_implementation="dpfed"`` known to transformers."""
    masks = import_module("transformers.masking_utils")
    import_module("transformers").AttentionInterface.register("dpfed", hugging_face_attention)
    masks.AttentionMaskInterface.register("dpfed", partial(hugging_face_mask, masks.eager_mask))


def patches(
    x: Tensor,
    window: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
) -> Tensor:
    """``[N, C, H, W]`` -> ``[N, H', W', h w C]``: what a convolution with a window of h x w multiplies with its weight.

    >>> x, weight = torch.ones(1, 2, 3, 3), torch.ones(4, 2, 2, 2)
    >>> found = patches(x, (2, 2)) @ weight.permute(0, 2, 3, 1).flatten(1).T
    >>> torch.equal(found.permute(0, 3, 1, 2), torch.nn.functional.conv2d(x, weight))
    True
    """
    (height, width), (down, right) = window, stride
    x = functional.pad(x, (padding[1], padding[1], padding[0], padding[0])).permute(0, 2, 3, 1)
    rows, columns = (
        (size - step * (kernel - 1) - 1) // jump + 1
        for size, step, kernel, jump in zip(x.shape[1:3], dilation, (height, width), stride, strict=True)
    )
    if (height, width) == tuple(stride) and max(dilation) == 1:  # nothing overlaps
        tiles = x[:, : rows * down, : columns * right].unflatten(2, (columns, right)).unflatten(1, (rows, down))
        return tiles.transpose(2, 3).flatten(3)
    above, left = range(0, height * dilation[0], dilation[0]), range(0, width * dilation[1], dilation[1])
    last = (rows - 1) * down + 1, (columns - 1) * right + 1
    return torch.cat([x[:, i : i + last[0] : down, j : j + last[1] : right] for i in above for j in left], -1)


class Product(NamedTuple):
    """One use of a weight W on one record: ``rows`` [L, in], by which W is multiplied; of a table, which of its rows [L],
    -1 where that row gets no gradient."""

    kind: Literal["linear", "convolution", "table"]
    name: str
    rows: Tensor


class Products(TorchFunctionMode):
    """Watches a forward pass for products with these weights; ``by_patches``: convolutions among them, and all others whose
    windows do not overlap, become such products.

    To what comes out of a product with one of ``large``, ``probe(name, out)`` is added. From there this weight gets no
    gradient; that of the probe is the other factor of what it would have been. ``found`` are these products in their order.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        large: Collection[str],
        probe: Callable[[str, Tensor], Tensor],
        by_patches: bool = True,
    ) -> None:
        super().__init__()
        self.found: list[Product] = []
        self._weights, self._large, self._probe, self._by_patches = weights, large, probe, by_patches

    def __torch_function__(self, func: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named, product = named or {}, _PRODUCTS.get(func)
        weight = given[1] if len(given) > 1 else named.get("weight")
        name = None if product is None else next((n for n, other in self._weights.items() if other is weight), None)
        probed = name in self._large
        as_patches = product is _convolution and self._by_patches and (name is not None or _tiles(*given, **named))
        if product is None or not (probed or as_patches):
            return func(*given, **named)
        sight = product(*given, **named)
        if sight is None or not probed:
            return func(*given, **named) if sight is None else sight.finish(sight.multiply(weight))
        out = sight.multiply(weight.detach())
        self.found.append(Product(sight.kind, cast(str, name), sight.rows))
        return sight.finish(out + self._probe(cast(str, name), out))


class _Sight(NamedTuple):
    """A product that is about to happen: ``finish(multiply(weight))``."""

    kind: Literal["linear", "convolution", "table"]
    rows: Tensor
    multiply: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], Tensor]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Sight:
    def multiply(weight: Tensor) -> Tensor:
        return functional.linear(input, weight, bias)

    return _Sight("linear", input.reshape(-1, input.shape[-1]), multiply, _as_it_is)


def _windows(stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> list[tuple[int, ...]] | None:
    """Stride, padding and dilation, down and right, of a convolution that is one product of its patches."""
    if groups != 1 or isinstance(padding, str):
        return None
    return [(value, value) if isinstance(value, int) else tuple(value) for value in (stride, padding, dilation)]


def _tiles(input: Tensor, weight: Tensor, bias: Tensor | None = None, *how: Any, **named: Any) -> bool:
    """Whether its windows lie side by side, as where a transformer cuts a picture into pieces: nothing is then read twice."""
    size = tuple(weight.shape[2:])
    return max(size) > 1 and _windows(*how, **named) == [size, (0, 0), (1, 1)]


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, *how: Any, **named: Any) -> _Sight | None:
    twice = _windows(*how, **named)
    if twice is None or input.dim() != 4:
        return None
    seen = patches(input, weight.shape[2:], *twice)

    def multiply(weight: Tensor) -> Tensor:
        return functional.linear(seen, weight.permute(0, 2, 3, 1).flatten(1), bias)

    def finish(out: Tensor) -> Tensor:
        return out.permute(0, 3, 1, 2).contiguous()

    return _Sight("convolution", seen.flatten(0, 2), multiply, finish)


def _table(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Sight | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    rows = input if padding_idx is None else torch.where(input == padding_idx % len(weight), -1, input)

    def multiply(weight: Tensor) -> Tensor:
        return functional.embedding(input, weight, padding_idx)

    return _Sight("table", rows.flatten(), multiply, _as_it_is)


def _as_it_is(out: Tensor) -> Tensor:
    return out


_PRODUCTS: dict[Any, Callable[..., _Sight | None]] = {
    functional.linear: _linear,
    functional.conv2d: _convolution,
    functional.embedding: _table,
}
