"""Models of texts, on the columns of `dpfed.tasks.text.tokenise`: ``input_ids``, ``attention_mask``, ``token_type_ids``.

Which tokens there are is a column of each record. The mask that attention adds is made of it inside the forward pass of one
record: what transformers would make of it depends on the data, and cannot be mapped over records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfed.errors import InputError
from dpfed.flat import Records
from dpfed.models.transformer import load

UNSEEN = -3e4  # far below any score, and finite in every dtype
UNJUDGED = -100  # a label that no loss is taken for


class TextClassifier(nn.Module):
    """Tokens ``[n, T]`` and which of them are there -> logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        kinds = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.model(input_ids=input_ids, attention_mask=_added(attention_mask[:, None, None, :]), **kinds).logits


class CausalLM(nn.Module):
    """Tokens ``[n, T]`` -> for every place the logits of the token after it, ``[n, T, words]``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        length = input_ids.shape[1]
        before = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        mask = _added(before & attention_mask[:, None, None, :].bool())
        return self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits


def _added(seen: Tensor) -> Tensor:
    return torch.where(seen.bool(), 0.0, UNSEEN)


def text_classifier(
    source: str | Path | Any, num_classes: int | None = None, *, dropout: float | None = None, seed: int = 0
) -> TextClassifier:
    """BERT, RoBERTa and their like, on sentences or pairs of them; the arguments are those of `image_classifier`.

    With dropout in its attention (``dropout=None``, and a configuration that says so), a step takes longer.
    """
    return TextClassifier(load("AutoModelForSequenceClassification", source, num_classes, dropout, seed))


def causal_lm(source: str | Path | Any, *, dropout: float | None = None, seed: int = 0) -> CausalLM:
    """Llama and its like; a record is one sequence. The criterion is `next_token`, the records come from `sequences`."""
    return CausalLM(load("AutoModelForCausalLM", source, None, dropout, seed))


def sequences(records: Records) -> Records:
    """Tokenised texts as records of language modelling: ``y`` is the sequence itself, without what only fills it up."""
    if missing := {"input_ids", "attention_mask"} - set(records):
        raise InputError(f"records: have no column {' and no '.join(sorted(missing))}. Make them with tokenise().")
    ids, there = records["input_ids"], records["attention_mask"]
    return {"input_ids": ids, "attention_mask": there, "y": torch.where(there.bool(), ids, UNJUDGED).long()}


def next_token(output: Tensor, target: Tensor) -> Tensor:
    """The criterion of language modelling: cross entropy of every token given those before it, the mean over the sequence."""
    output, target = cast(Tensor, getattr(output, "logits", output))[:, :-1], target[:, 1:].long()
    total = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=UNJUDGED, reduction="sum")
    return total / (target != UNJUDGED).sum().clamp(min=1)
