"""A model as a function of one vector.

All trainable parameters are one vector ``theta`` of length ``d``; a public ``Layout`` says which coordinates are which
tensor. Clipping, noise, moments, aggregation, transport and checkpoints are then single vector operations, and a cohort of
S clients is a matrix ``[S, d]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dpfed.dropout import drawing, with_keyed_dropout
from dpfed.errors import InputError
from dpfed.keyed import fold
from dpfed.metrics import check_judging, check_metrics, judged

Records = dict[str, Tensor]
"""Records as columns: one tensor per input, first axis = record; the column ``y`` is the target."""

BlockRule = Literal["paper", "tensor", "neuron", "none"]
Criterion = Callable[[Tensor, Tensor], Tensor]
Augment = Callable[[Records, Tensor], Records]
"""A record and its key to the record as it is trained on; random numbers come from `dpfed.keyed`."""


class Part(NamedTuple):
    """One parameter tensor inside ``theta``. ``head_rows`` > 0: its rows are attention heads of that many rows each."""

    name: str
    shape: tuple[int, ...]
    group: str
    head_rows: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Blocks(NamedTuple):
    """A partition of the coordinates into contiguous blocks: ``runs`` of ``(how many, how long)``.

    >>> blocks = Blocks(((2, 2), (1, 3)))
    >>> blocks.mean(torch.tensor([1.0, 3.0, 5.0, 7.0, 0.0, 1.0, 2.0]))
    tensor([2., 6., 1.])
    >>> blocks.spread(torch.tensor([2.0, 6.0, 1.0]))
    tensor([2., 2., 6., 6., 1., 1., 1.])
    """

    runs: tuple[tuple[int, int], ...]

    @property
    def num_blocks(self) -> int:
        return sum(count for count, _ in self.runs)

    def mean(self, x: Tensor) -> Tensor:
        """``[..., d] -> [..., num_blocks]``"""
        pieces = x.split([count * length for count, length in self.runs], dim=-1)
        return torch.cat([p.unflatten(-1, run).mean(-1) for p, run in zip(pieces, self.runs, strict=True)], dim=-1)

    def spread(self, per_block: Tensor) -> Tensor:
        """``[..., num_blocks] -> [..., d]``: every coordinate gets the value of its block."""
        pieces = per_block.split([count for count, _ in self.runs], dim=-1)
        wide = [p.unsqueeze(-1).expand(*p.shape, n).flatten(-2) for p, (_, n) in zip(pieces, self.runs, strict=True)]
        return torch.cat(wide, dim=-1)


@dataclass(frozen=True)
class Layout:
    """The public map of ``theta``: which coordinates are which tensor, group and block."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The trainable parameters of a module, LoRA's A and B gathered behind the others so that groups are contiguous."""
        parts = [
            Part(name, tuple(p.shape), _group(name), _head_rows(module, name))
            for name, p in module.named_parameters()
            if p.requires_grad
        ]
        return cls(tuple(sorted(parts, key=lambda part: ("weights", "lora_A", "lora_B").index(part.group))))

    @cached_property
    def sizes(self) -> list[int]:
        return [part.size for part in self.parts]

    @cached_property
    def num_coordinates(self) -> int:
        return sum(self.sizes)

    def views(self, theta: Tensor) -> dict[str, Tensor]:
        """The tensors inside ``theta``, by name, without a copy. Works on ``[d]`` and on ``[S, d]``."""
        pieces = theta.split(self.sizes, dim=-1)
        return {part.name: p.reshape((*p.shape[:-1], *part.shape)) for part, p in zip(self.parts, pieces, strict=True)}

    def aligned(self, theta: Tensor) -> dict[str, Tensor]:
        """``views`` of a copy in which every tensor begins, in every row, at a multiple of 8 coordinates.

        A GPU multiplies matrices that begin elsewhere several times more slowly.
        """
        runs = [0]
        for size in self.sizes:
            runs[-1] += size
            runs += [0] if size % 8 else []
        padded = [nn.functional.pad(run, (0, -run.shape[-1] % 8)) for run in theta.split(runs, dim=-1)]
        pieces = torch.cat(padded, dim=-1).split([size + -size % 8 for size in self.sizes], dim=-1)
        shorter = zip(self.parts, pieces, strict=True)
        return {part.name: p[..., : part.size].reshape((*p.shape[:-1], *part.shape)) for part, p in shorter}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The inverse of ``views`` for single tensors."""
        return torch.cat([tensors[part.name].reshape(-1) for part in self.parts])

    def group(self, name: str) -> slice:
        """Where a group (``weights``, ``lora_A``, ``lora_B``) lies in ``theta``."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        inside = [i for i, part in enumerate(self.parts) if part.group == name]
        return slice(starts[inside[0]], starts[inside[-1] + 1]) if inside else slice(0, 0)

    def blocks(self, rule: BlockRule = "paper") -> Blocks:
        """The blocks that share a second moment.

        ``paper``: attention by head, LoRA's A by tensor, every other module one block (weight and bias together).
        ``tensor``: one block a tensor. ``neuron``: one block a row. ``none``: every coordinate its own.
        """
        return _blocks(self.parts, rule)


@lru_cache(maxsize=64)
def _blocks(parts: tuple[Part, ...], rule: BlockRule) -> Blocks:
    if rule == "none":
        return Blocks(((sum(p.size for p in parts), 1),))
    if rule == "tensor":
        return _merge((1, part.size) for part in parts)
    if rule == "neuron":
        return _merge((p.shape[0], p.size // p.shape[0]) if len(p.shape) > 1 else (1, p.size) for p in parts)
    runs: list[tuple[int, int]] = []
    open_module = None
    for part in parts:
        module = part.name.rpartition(".")[0]
        if part.head_rows:
            count = part.shape[0] // part.head_rows
            runs.append((count, part.size // count))
        elif module == open_module:
            runs[-1] = (1, runs[-1][1] + part.size)
        else:
            runs.append((1, part.size))
        open_module = None if part.head_rows else module
    return _merge(runs)


def _merge(runs: Iterable[tuple[int, int]]) -> Blocks:
    """Neighbouring runs of equally long blocks become one run: fewer, larger operations."""
    merged: list[tuple[int, int]] = []
    for count, length in runs:
        if merged and merged[-1][1] == length:
            merged[-1] = (merged[-1][0] + count, length)
        else:
            merged.append((count, length))
    return Blocks(tuple(merged))


def _group(name: str) -> str:
    return "lora_A" if "lora_A" in name else "lora_B" if "lora_B" in name else "weights"


_ATTENTION_INPUTS = ("qkv", "in_proj", "query", "key", "value", "q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin")


def _head_rows(module: nn.Module, name: str) -> int:
    """Rows of one attention head in this tensor, or 0. The attention module above the tensor says how many heads it has."""
    pieces = name.split(".")
    where = next((i for i, piece in enumerate(pieces) if piece.startswith(_ATTENTION_INPUTS)), None)
    if where is None or "lora_A" in name:
        return 0
    attention = module.get_submodule(".".join(pieces[:where]))
    shape = module.get_parameter(name).shape
    rows = getattr(attention, "head_dim", None) or getattr(attention, "attention_head_size", None)
    if not isinstance(rows, int):
        heads = getattr(attention, "num_heads", None) or getattr(attention, "num_attention_heads", None)
        width = shape[0] // 3 if pieces[where].startswith(("qkv", "in_proj")) else shape[0]
        rows = width // heads if isinstance(heads, int) and width % heads == 0 else 0
    return rows if rows and shape[0] % rows == 0 else 0


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Of a batch of logits, or of a Hugging Face output that has ``.logits``; never in less than float32."""
    return nn.functional.cross_entropy(widened(getattr(output, "logits", output)), target)


def widened(x: Tensor) -> Tensor:
    """Numbers of half precision as float32; all others as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


class FlatModel:
    """A module as a function of ``theta``. The module itself is never written to.

    ``criterion(output, target)`` gives the loss of a batch; it is always called with a batch of one record, so no record's
    loss can depend on another record. A record that has a key (the column ``key``) is trained on: it is augmented, and dropouts
    are active. One without is judged as it is. ``metrics`` are names of `dpfed.metrics`.
    """

    def __init__(
        self,
        module: nn.Module,
        criterion: Criterion = cross_entropy,
        augment: Augment | None = None,
        metrics: Sequence[str] = ("accuracy",),
    ) -> None:
        _refuse_unsafe(module)
        check_metrics(metrics)
        self.metrics = tuple(metrics)
        self.module, self.drops = module.eval(), with_keyed_dropout(module)
        self.criterion = criterion
        self.augment = augment
        self.layout = Layout.of(module)
        if not self.layout.parts:
            raise InputError("model: no parameter has requires_grad=True, so there is nothing to train. Unfreeze some.")

    @property
    def num_parameters(self) -> int:
        return self.layout.num_coordinates

    @property
    def needs_key(self) -> bool:
        """Whether training draws random numbers of its own for every record."""
        return self.augment is not None or self.drops

    def to(self, device: torch.device | str) -> FlatModel:
        self.module.to(device)
        return self

    def theta0(self) -> Tensor:
        """The starting point: a copy of the module's own parameters."""
        return self.layout.flatten({name: p.detach() for name, p in self.module.named_parameters()}).clone()

    def frozen(self, dtype: torch.dtype | None = None) -> Records:
        """The module's tensors that are not trained, by name; numbers in ``dtype``, if one is given. (The frequencies of
        rotary positions keep theirs: rounded, they would be other positions.)"""
        named = [(name, p.detach()) for name, p in self.module.named_parameters() if not p.requires_grad]
        named += list(self.module.named_buffers())
        return {name: x if name.endswith("inv_freq") else in_dtype(x, dtype) for name, x in named}

    def in_dtype(self, records: Records, dtype: torch.dtype | None) -> Records:
        """What goes into the module in this precision, if one is given; targets as they are."""
        return {name: column if name == "y" else in_dtype(column, dtype) for name, column in records.items()}

    def output(self, weights: Records, example: Records) -> Tensor:
        """What the module with these tensors (`Layout.views` of a theta) says about one record (a batch of one)."""
        inputs = {name: column.unsqueeze(0) for name, column in example.items() if name not in ("y", "key")}
        if set(inputs) == {"x"}:
            return cast(Tensor, functional_call(self.module, weights, (inputs["x"],)))
        return cast(Tensor, functional_call(self.module, weights, (), inputs))

    def loss(self, weights: Records, example: Records) -> Tensor:
        """The loss of one record, never in less than float32."""
        key = example.get("key")
        if self.augment is not None and key is not None:
            example = self.augment({name: value for name, value in example.items() if name != "key"}, key)
        with drawing(None if key is None else fold(key, -1)):  # augmentations have the streams from 0 on
            output = self.output(weights, example)
        output = widened(output) if isinstance(output, Tensor) else output  # pyright: ignore[reportUnnecessaryIsInstance]
        return self.criterion(output, example["y"].unsqueeze(0))

    def evaluate(
        self, theta: Tensor, records: Records, shares: Sequence[Tensor] | None = None, at_once: int = 500
    ) -> dict[str, Any]:
        """Mean loss (over records, not over batches) and, where the criterion is cross entropy, the metrics.

        ``shares``: for every client the rows of the records that are its own part of the test. Batches are not waited for.
        """

        weights = self.layout.views(theta)

        def judge(example: Records) -> tuple[Tensor, Tensor]:
            output, target = self.output(weights, example), example["y"].unsqueeze(0)
            scores = (
                cast(Tensor, getattr(output, "logits", output)) if self.criterion is cross_entropy else theta.new_zeros(1, 1)
            )
            return self.criterion(output, target), scores.squeeze(0)

        with torch.no_grad():
            columns = {name: column.to(theta.device) for name, column in records.items()}
            batches = zip(*(column.split(at_once) for column in columns.values()), strict=True)
            losses, scores = zip(*(vmap(judge)(dict(zip(columns, batch, strict=True))) for batch in batches), strict=True)
            found = {"loss": torch.cat(losses).double().mean()}
            if self.criterion is cross_entropy:
                predicted = torch.cat([batch.argmax(1) for batch in scores])
                found |= judged(self.metrics, columns["y"], predicted, scores[0].shape[1], shares)
        return {name: value.tolist() for name, value in found.items()}

    def check(self, records: Records, test: Records | None = None, shares: Sequence[Tensor] | None = None) -> None:
        """Try one record, and the range of the labels, before anything is spent; and whether the test can be judged."""
        if "key" in records:
            raise InputError("records: the column 'key' is the name of a record's own random key. Call yours something else.")
        weights = self.layout.views(self.theta0())
        device = next(iter(weights.values())).device
        example = {name: column[0].to(device) for name, column in records.items()}
        shapes = {name: tuple(column.shape) for name, column in example.items()}
        before = {name: (x, x._version) for name, x in self.module.named_buffers()}
        try:
            with torch.no_grad():
                if self.needs_key:
                    self.loss(weights, example | {"key": torch.tensor(0, device=device)})
                output = self.output(weights, example)
                now = dict(self.module.named_buffers())
                written = [name for name, (x, version) in before.items() if now.get(name) is not x or x._version != version]
                if written:
                    raise InputError(
                        f"model: its forward pass writes to the buffer '{written[0]}'. What one record leaves there, the "
                        "gradients of others would see, and no noise covers it. Leave the buffer as it is."
                    )
                if self.criterion is not cross_entropy:
                    loss = self.loss(weights, example)
                    if loss.numel() != 1:
                        raise InputError(f"criterion: must give one number, gave shape {tuple(loss.shape)}. Average it.")
                    return
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"model: it cannot take one record of shapes {shapes} (as a batch of one): {error}. "
                "Reshape the records, or change the model's first layer."
            ) from error
        logits = cast(Tensor, getattr(output, "logits", output))
        labels = records["y"]
        if logits.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():
            raise InputError(
                f"y: cross entropy needs one whole number per record and logits [1, classes]; got labels of shape "
                f"{tuple(labels.shape)} ({labels.dtype}) and logits of shape {tuple(logits.shape)}. "
                "Give other labels, or your own criterion."
            )
        num_classes = logits.shape[1]
        _check_labels("y", labels, num_classes)
        if test is not None:
            _check_labels("test, y", test["y"], num_classes)
            check_judging(self.metrics, num_classes, shares)


def in_dtype(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Numbers in this precision, where one is asked for; whole numbers stay. The largest of float32 stay finite."""
    if dtype is None or not x.is_floating_point() or x.dtype == dtype:
        return x
    most = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-most, most), x).to(dtype)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """The same on a device; what goes to a GPU goes while the program runs on, and waits for nothing that it still computes."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _check_labels(field: str, labels: Tensor, num_classes: int) -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise InputError(
            f"{field}: labels go from {low} to {high}, but the model has {num_classes} outputs (labels 0 to "
            f"{num_classes - 1}). Relabel the records, or give the model more outputs."
        )


def _refuse_unsafe(module: nn.Module) -> None:
    for name, part in module.named_modules():
        where = f"model: layer '{name}' ({type(part).__name__})"
        if isinstance(part, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
            raise InputError(
                f"{where} mixes the records of a batch and keeps their statistics, which breaks the guarantee for a "
                "single record. Replace it by torch.nn.GroupNorm or LayerNorm."
            )
        if isinstance(part, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d) and part.track_running_stats:
            raise InputError(f"{where} keeps statistics of the data without noise. Set track_running_stats=False.")
