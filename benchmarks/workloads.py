"""The models and cohorts that the GPU benchmark times: vision and language transformers under LoRA, and a residual network.

The weights are random: what a step costs does not depend on them. ``tiny=True`` shrinks every model to two layers, to try the
benchmark itself on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from dpfed.fast_lora import lora
from dpfed.flat import Records

RANK = 16


class Workload(NamedTuple):
    """``build(attention, tiny)`` gives the module; ``side`` is that of the pictures, or the number of tokens."""

    build: Callable[[str, bool], nn.Module]
    num_clients: int
    batch_size: int
    side: int
    classes: int
    tokens: bool = False
    memory_gib: float = 24.0

    def shape(self, tiny: bool) -> tuple[int, int]:
        return (2, 3) if tiny else (self.num_clients, self.batch_size)

    def examples(self, tiny: bool, device: str, dtype: torch.dtype, num_records: int | None = None) -> Records:
        """``[clients, records]``, by default a batch for every client."""
        num_clients, size = self.shape(tiny)
        shape = num_clients, num_records or size
        y = torch.randint(self.classes, shape, device=device)
        if not self.tokens:
            side = 32 if tiny else self.side
            return {"pixel_values": torch.randn(*shape, 3, side, side, device=device).to(dtype), "y": y}
        length = 16 if tiny else self.side
        ids = torch.randint(3, 100 if tiny else 50_000, (*shape, length), device=device)
        lengths = torch.randint(length // 4, length + 1, (*shape, 1), device=device)
        seen = torch.arange(length, device=device) < lengths
        mask = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, :, None, None].expand(*shape, 1, length, length)
        places = torch.arange(2, length + 2, device=device).expand(*shape, length)
        return {"input_ids": ids, "attention_mask": mask.contiguous(), "position_ids": places.contiguous(), "y": y}


class Lora(nn.Module):
    """A frozen linear layer, and beside it one of low rank that is trained (Hu et al., 2021, arXiv 2106.09685)."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen, self.num_records = frozen, 0
        self.lora_A, self.lora_B = (
            nn.Linear(frozen.in_features, RANK, bias=False),
            nn.Linear(RANK, frozen.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Opacus takes the first axis for the records, also where it holds their windows: ``num_records`` puts that right."""
        inside = x.reshape(self.num_records, -1, x.shape[-1]) if self.num_records and x.dim() > 2 else x
        return self.frozen(x) + (2 * self.lora_B(self.lora_A(inside))).reshape(*x.shape[:-1], -1)


class FastLora(Lora):
    """The same numbers by the operator of the library."""

    def forward(self, x: Tensor) -> Tensor:
        return lora(x, self.frozen.weight, self.frozen.bias, self.lora_A.weight, self.lora_B.weight, 2.0)


def with_fast_lora(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, Lora):
            part.__class__ = FastLora
    return module


def with_lora(model: nn.Module, head: str) -> nn.Module:
    """Everything frozen but the head, and LoRA on every linear layer outside of it."""
    model.requires_grad_(False)
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and not name.startswith(head)]
    for name in linear:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Lora(model.get_submodule(name)))
    model.get_submodule(head).requires_grad_(True)
    return model.eval()


class Logits(nn.Module):
    """Only the logits of a Hugging Face model, by names or (for the peers' loops) in the order of the columns."""

    def __init__(self, model: nn.Module, columns: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.columns = model, columns

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.model(**dict(zip(self.columns, inputs, strict=False)), **named).logits


def vit(attention: str, tiny: bool, lora: bool = True, **size: Any) -> nn.Module:
    size |= (
        {"image_size": 32, "patch_size": 8, "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3} if tiny else {}
    )
    size["intermediate_size"] = 4 * size["hidden_size"]
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = ViTForImageClassification(ViTConfig(num_labels=100, attn_implementation=attention, **size, **quiet))
    return Logits(with_lora(model, "classifier") if lora else model.eval(), ("pixel_values",))


def vit_base(attention: str, tiny: bool, lora: bool = True) -> nn.Module:
    return vit(
        attention, tiny, lora, image_size=224, patch_size=16, num_hidden_layers=12, hidden_size=768, num_attention_heads=12
    )


def vit_base_full(attention: str, tiny: bool) -> nn.Module:
    return vit_base(attention, tiny, lora=False)


def vit_tiny(attention: str, tiny: bool) -> nn.Module:
    return vit(attention, tiny, image_size=32, patch_size=4, num_hidden_layers=12, hidden_size=192, num_attention_heads=3)


def swin(attention: str, tiny: bool, **size: Any) -> nn.Module:
    size |= {"image_size": 32, "window_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]} if tiny else {}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
    model = SwinForImageClassification(SwinConfig(num_labels=100, attn_implementation=attention, **size, **quiet))
    return Logits(with_lora(model, "classifier"), ("pixel_values",))


def swin_tiny(attention: str, tiny: bool) -> nn.Module:
    return swin(attention, tiny, image_size=224, window_size=7, embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24])


def swin_base(attention: str, tiny: bool) -> nn.Module:
    return swin(attention, tiny, image_size=224, window_size=7, embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])


def roberta_base(attention: str, tiny: bool) -> nn.Module:
    small = {"vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    size = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1} | (
        small if tiny else {}
    )
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = RobertaForSequenceClassification(RobertaConfig(num_labels=2, attn_implementation=attention, **size, **quiet))
    return Logits(with_lora(model, "classifier"), ("input_ids", "attention_mask", "position_ids"))


class Residual(nn.Module):
    """Two 3 x 3 convolutions with group norm, and a shortcut (He et al., 2015, arXiv 1512.03385)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.GroupNorm(outside // 8, outside)
        self.conv2, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.GroupNorm(outside // 8, outside)
        shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False), nn.GroupNorm(outside // 8, outside)
        self.shortcut = nn.Sequential(*shortcut) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (inner + self.shortcut(x)).relu()


class ResNet18(nn.Module):
    """For 32 px, with group norm; every parameter is trained."""

    def __init__(self, width: int = 64, num_stages: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(num_stages)]
        blocks = [Residual(widths[max(i - 1, 0)], w, 1 + (i > 0)) for i, w in enumerate(widths)]
        pairs = [block for first, w in zip(blocks, widths, strict=True) for block in (first, Residual(w, w, 1))]
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(width // 8, width)
        self.blocks, self.head = nn.Sequential(*pairs), nn.Linear(widths[-1], 100)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(pixel_values)).relu()).mean((2, 3)))


def resnet(attention: str, tiny: bool) -> nn.Module:
    return ResNet18(16, 2) if tiny else ResNet18()


WORKLOADS = {
    "vit-base": Workload(vit_base, 5, 16, 224, 100),
    "vit-tiny": Workload(vit_tiny, 10, 50, 32, 100),
    "swin-tiny": Workload(swin_tiny, 5, 16, 224, 100),
    "swin-base": Workload(swin_base, 5, 16, 224, 100, memory_gib=32.0),
    "roberta-base": Workload(roberta_base, 4, 16, 128, 2, tokens=True),
    "resnet-18": Workload(resnet, 10, 50, 32, 100, memory_gib=24.0),
    "vit-base, all": Workload(vit_base_full, 5, 16, 224, 100, memory_gib=40.0),
}


class WholeRun(NamedTuple):
    """A run as in a paper: of a workload, with so many records a client; the first ``timed_rounds`` are run."""

    workload: str
    rounds: int
    timed_rounds: int
    local_steps: int
    num_records: int


RUNS = {
    "swin-base, run": WholeRun("swin-base", 100, 100, 20, 100),
    "resnet-18, run": WholeRun("resnet-18", 300, 8, 50, 500),
}
