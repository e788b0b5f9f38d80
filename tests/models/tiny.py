"""Small models of every family, and records for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from dpfed.flat import Criterion, Records, cross_entropy
from dpfed.models import (
    causal_lm,
    configuration,
    image_classifier,
    next_token,
    resnet18,
    sequences,
    tanh_cnn,
    text_classifier,
    wide_resnet,
)
from dpfed.tasks.citation import GraphConvolution

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
WORDS = SMALL | {"vocab_size": 40, "max_position_embeddings": 20}
T = 9


class Family(NamedTuple):
    """``build(**dropout)`` gives the model, ``records(n)`` what it is trained on."""

    build: Callable[..., nn.Module]
    records: Callable[[int], Records]
    criterion: Criterion = cross_entropy
    heads: int = 3
    value_heads: int = 3


def vit(**settings: Any) -> nn.Module:
    return image_classifier(configuration("vit-tiny", **SMALL, image_size=8, patch_size=4), 5, **settings)


def swin(**settings: Any) -> nn.Module:
    size = {"image_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4]}
    return image_classifier(configuration("swin-tiny", **size), 5, **({"dropout": 0.0} | settings))


def roberta(**settings: Any) -> nn.Module:
    return text_classifier(configuration("roberta-base", **WORDS), 3, **({"dropout": 0.0} | settings))


def bert(**settings: Any) -> nn.Module:
    return text_classifier(configuration("bert-base", **WORDS), 3, **({"dropout": 0.0} | settings))


def llama(**settings: Any) -> nn.Module:
    size = WORDS | {"num_attention_heads": 6, "num_key_value_heads": 2}
    return causal_lm(configuration("tinyllama", **size), **settings)


def gcn(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return GraphConvolution(6, 4, 8)


def pictures(side: int) -> Callable[[int], Records]:
    return lambda n: {"x": torch.randn(n, 3, side, side), "y": torch.arange(n) % 5}


def texts(n: int, pad: int = 1) -> Records:
    """Of 3 to ``T`` tokens, filled up at the end."""
    there = torch.arange(T) < torch.randint(3, T + 1, (n, 1))
    ids = torch.where(there, torch.randint(4, 40, (n, T)), pad).int()
    return {"input_ids": ids, "attention_mask": there, "y": torch.arange(n) % 3}


def pairs(n: int) -> Records:
    return texts(n, pad=0) | {"token_type_ids": (torch.arange(T) > 3).int().expand(n, T).clone()}


def nodes(n: int) -> Records:
    around = {"neighbours": torch.randn(n, 2, 6), "there": torch.rand(n, 2) < 0.7}
    return {"x": torch.randn(n, 6), "y": torch.arange(n) % 4} | around


TRANSFORMERS = {
    "vit": Family(vit, pictures(8)),
    "swin": Family(swin, pictures(16)),
    "roberta": Family(roberta, texts),
    "bert": Family(bert, pairs),
    "llama": Family(llama, lambda n: sequences(texts(n, pad=0)), next_token),
}
OTHERS = {
    "resnet": Family(lambda: resnet18(5, width=8), pictures(8)),
    "wide resnet": Family(lambda: wide_resnet(5, depth=10, factor=1, groups=4), pictures(8)),
    "cnn": Family(lambda: tanh_cnn(5), pictures(32)),
    "gcn": Family(gcn, nodes),
}
