"""What transformers hides from attention: the same numbers as with its own attention, and no mask where nothing is hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpfed import fast

transformers = pytest.importorskip("transformers")
WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = WIDE | {"vocab_size": 20, "pad_token_id": 1, "max_position_embeddings": 12}
KINDS = {
    "pictures": ("ViT", WIDE | {"image_size": 8, "patch_size": 4}),
    "texts": ("Roberta", WORDS),
    "language": ("Llama", WORDS | {"num_key_value_heads": 1}),
    "windows": ("Mistral", WORDS | {"num_key_value_heads": 1, "sliding_window": 3}),
}


def model(kind: str, attention: str) -> nn.Module:
    fast.register()
    torch.manual_seed(0)
    name, setting = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(attn_implementation=attention, **setting)
    return getattr(transformers, f"{name}Model")(config).double().eval()


def inputs(kind: str, hidden: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if kind == "pictures":
        return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    seen = torch.ones(2, 6, dtype=torch.long)
    seen[1, 4:] = 0
    square = seen[:, None, None, :].bool() & torch.ones(6, 6, dtype=torch.bool).tril()
    added = torch.where(square, 0.0, -1e4).double()
    masks = {"nothing": {}, "words": {"attention_mask": seen}, "yes or no": {"attention_mask": square}}
    masks["added"] = {"attention_mask": added}
    return {"input_ids": torch.randint(2, 20, (2, 6)), **masks[hidden]}


@pytest.mark.parametrize(
    ("kind", "hidden", "mask"),
    [
        ("pictures", "nothing", False),
        ("texts", "nothing", False),
        ("texts", "words", True),
        ("texts", "yes or no", True),
        ("texts", "added", True),
        ("language", "nothing", False),
        ("language", "words", True),
        ("language", "added", True),
        ("windows", "nothing", True),
    ],
)
def test_hidden_places_are_those_of_transformers(kind: str, hidden: str, mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Tensor | None] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **setting: Any) -> Tensor:
        masks.append(mask)
        return own(q, k, v, mask, **setting)

    own, given = fast.attention, inputs(kind, hidden)
    monkeypatch.setattr(fast, "attention", attention)
    found = model(kind, "dpfed")(**given).last_hidden_state
    expected = model(kind, "sdpa")(**given).last_hidden_state
    there = given["attention_mask"].bool() if hidden == "words" else torch.ones(found.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(found[there], expected[there], rtol=1e-10, atol=1e-10)
    assert [one is not None for one in masks] == [mask, mask]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch, about itself
@pytest.mark.parametrize("kind", ["pictures", "language"])
def test_nothing_is_hidden_when_records_are_mapped_over_and_compiled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: column.unsqueeze(1) for name, column in inputs(kind, "nothing").items()}

    def gradients(attention: str) -> Any:
        module = model(kind, attention)
        weights = {name: p.detach() for name, p in module.named_parameters()}

        def loss(weights: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
            cache = {} if kind == "pictures" else {"use_cache": False}
            return functional_call(module, weights, (), example | cache).last_hidden_state.sin().sum()

        return vmap(grad(loss), in_dims=(None, 0)), weights

    expected, weights = gradients("eager")
    ours, _ = gradients("dpfed")
    torch.compiler.reset()
    fast.for_dynamo()
    found = torch.compile(ours, fullgraph=True, backend="aot_eager")(weights, given)
    for name, value in expected(weights, given).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)  # theirs takes exp in float32
    if kind == "pictures":
        monkeypatch.setattr(fast, "attention", lambda q, k, v, mask, **setting: _without(mask, q))
        torch.compiler.reset()
        torch.compile(ours, fullgraph=True, backend="aot_eager")(weights, given)


def _without(mask: Tensor | None, q: Tensor) -> Tensor:
    assert mask is None
    return q
