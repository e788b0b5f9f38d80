"""What is trained of a model, in which blocks, and that others can load it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpfed import FedAvg, FlatModel, Gaussian, InputError, Recipe, RunRecord, Task, iid, run, save_adapter, save_merged
from dpfed.flat import Records
from dpfed.models import (
    causal_lm,
    configuration,
    image_classifier,
    lora,
    text_classifier,
    train_all,
    train_head,
    train_last,
)
from tests.models.tiny import TRANSFORMERS, bert, llama, vit

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::DeprecationWarning:torch")

LOADERS: dict[str, tuple[Callable[..., nn.Module], Any, int | None]] = {
    "vit": (image_classifier, transformers.AutoModelForImageClassification, 6),
    "swin": (image_classifier, transformers.AutoModelForImageClassification, 6),
    "bert": (text_classifier, transformers.AutoModelForSequenceClassification, 4),
    "roberta": (text_classifier, transformers.AutoModelForSequenceClassification, 4),
    "llama": (causal_lm, transformers.AutoModelForCausalLM, None),
}


def logits(model: Any, row: Records) -> torch.Tensor:
    """Of transformers' own model, with its own mask."""
    named = {"pixel_values" if k == "x" else k: v[None] for k, v in row.items() if k != "y"}
    with torch.no_grad():
        return model.eval()(**{k: v if v.is_floating_point() else v.long() for k, v in named.items()}).logits


@pytest.mark.parametrize("name", LOADERS)
def test_a_trained_adapter_loads_in_plain_peft(name: str, tmp_path: Path) -> None:
    family, (build, auto, classes) = TRANSFORMERS[name], LOADERS[name]
    pretrained: Any = family.build()
    pretrained.model.save_pretrained(tmp_path / "base")
    own = [tmp_path / "base"] if classes is None else [tmp_path / "base", classes]
    module = nn.Sequential(nn.Identity(), lora(build(*own), rank=2)) if name == "vit" else lora(build(*own), rank=2)
    records = family.records(12)
    task = Task(module, iid(records, 3), family.criterion)
    record = run(Recipe(task, FedAvg(lr=0.5), Gaussian(sigma=0.5, batch_size=4), 2, 2, cohort=2), tmp_path / "run")
    save_adapter(record, module, tmp_path / "adapter")
    save_merged(record, module, tmp_path / "whole")
    assert {path.suffix for path in (tmp_path / "adapter").iterdir()} <= {".json", ".safetensors", ".md"}

    resized = {} if classes is None else {"num_labels": classes, "ignore_mismatched_sizes": True}
    adapted = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base", **resized), tmp_path / "adapter")
    whole = auto.from_pretrained(tmp_path / "whole")
    model, row = FlatModel(module, family.criterion), {k: v[0] for k, v in records.items()}
    theta = model.layout.flatten(record.load_model())
    ours, before = (model.output(model.layout.views(at), row) for at in (theta, model.theta0()))
    seen = slice(int(row["attention_mask"].sum())) if name == "llama" else slice(None)
    for theirs in (adapted, whole):
        torch.testing.assert_close(logits(theirs, row)[:, seen], ours[:, seen], rtol=1e-5, atol=1e-5)
    assert (ours - before).abs().max() > 1e-3
    loaded = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base", **resized), tmp_path / "adapter")
    assert loaded.peft_config["default"].r == 2


# Blocks: (LoRA everywhere, everything trained), counted by hand.
# LoRA, a layer: A and one block a head for each of q, k, v; A and B for the output and the layers of the MLP.
# Everything, a layer: one block a head of weight and of bias for q, k, v; output, MLP, norms; behind them embeddings and heads.
BLOCKS = {
    "vit": (2 * (3 * (1 + 3) + 3 * 2) + 1, 2 * (3 * (3 + 3) + 3 + 2) + 4),
    "bert": (2 * (3 * (1 + 3) + 3 * 2) + 2 + 1, 2 * (3 * (3 + 3) + 3 + 2) + 6),
    "roberta": (2 * (3 * (1 + 3) + 3 * 2) + 2, 2 * (3 * (3 + 3) + 3 + 2) + 6),
    "swin": (2 * (3 * (1 + 2) + 6) + 2 + 2 * (3 * (1 + 4) + 6) + 1, 2 * (3 * 4 + 6) + 2 * (3 * 8 + 6) + 6),
    "llama": (2 * ((1 + 6) + 2 * (1 + 2) + 4 * 2), 2 * (6 + 2 + 2 + 4 + 2) + 3),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_papers_blocks_of_each_model(name: str) -> None:
    small = lora(TRANSFORMERS[name].build(), rank=2, targets="all-linear")
    for module, expected in zip((small, train_all(TRANSFORMERS[name].build())), BLOCKS[name], strict=True):
        layout = FlatModel(module).layout
        blocks = layout.blocks("paper")
        assert blocks.num_blocks == expected
        assert sum(count * length for count, length in blocks.runs) == layout.num_coordinates


@pytest.mark.parametrize(("name", "q", "v"), [("vit", 8, 8), ("bert", 8, 8), ("roberta", 8, 8), ("llama", 4, 4)])
def test_heads_have_their_rows(name: str, q: int, v: int) -> None:
    layout = FlatModel(lora(TRANSFORMERS[name].build(), rank=2)).layout
    rows = {part.name: part.head_rows for part in layout.parts if "lora_B" in part.name}
    assert {r for place, r in rows.items() if "q" in place.split(".")[-4]} == {q}
    assert {r for place, r in rows.items() if "v" in place.split(".")[-4]} == {v}
    assert not any(part.head_rows for part in layout.parts if "lora_A" in part.name)


def test_heads_of_swin_differ_by_stage() -> None:
    layout = FlatModel(lora(TRANSFORMERS["swin"].build(), rank=2)).layout
    counts = [part.shape[0] // part.head_rows for part in layout.parts if part.head_rows]
    assert sorted(set(counts)) == [2, 4]
    assert counts.count(2) == counts.count(4) == 2 * 3


def test_counts_of_what_is_trained() -> None:
    with torch.device("meta"):
        roberta = lora(text_classifier(configuration("roberta-base"), 2), targets="all-linear")
        swin = lora(image_classifier(configuration("swin-base"), 100))
        last = train_last(text_classifier(configuration("bert-base"), 2))
        head = train_head(image_classifier(configuration("vit-base"), 10))
    trained = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (roberta, swin, last, head)]
    width = 2 * 128 + 2 * 256 + 18 * 512 + 2 * 1024  # of a layer, summed over the layers of Swin-Base
    assert trained == [
        12 * 16 * (4 * 2 * 768 + 2 * 5 * 768) + 768 * 768 + 768 + 2 * 769,
        16 * 4 * 2 * width + 100 * 1025,
        7_087_872 + 590_592 + 1_538,  # "approximately 7M" in the DP-AdamW paper
        7_690,
    ]


def test_lora_is_drawn_by_key_and_can_freeze_a() -> None:
    one, other, third = (
        lora(bert(), rank=2, freeze_a=frozen, seed=seed) for frozen, seed in ((True, 3), (False, 3), (True, 4))
    )
    tensors = [{k: v for k, v in model.named_parameters() if "lora_A" in k} for model in (one, other, third)]
    assert all(tensors[1][name].equal(tensor) and not tensors[2][name].equal(tensor) for name, tensor in tensors[0].items())
    groups = [{part.group for part in FlatModel(model).layout.parts} for model in (one, other)]
    assert groups == [{"weights", "lora_B"}, {"weights", "lora_A", "lora_B"}]
    assert all(not p.any() for name, p in one.named_parameters() if "lora_B" in name)


def test_building_a_model_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, other = lora(vit(), rank=2), lora(vit(), rank=2)
    assert torch.rand(3).equal(expected)
    assert all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_last_layers_are_those_behind() -> None:
    names = [name for name, p in train_last(vit(), 1).named_parameters() if p.requires_grad]
    assert not [name for name in names if ".0." in name or "embeddings" in name]
    assert any("layernorm.weight" in name for name in names)
    assert any("classifier" in name for name in names)
    assert {name for name, p in train_head(bert()).named_parameters() if p.requires_grad} == {
        "model.classifier.weight",
        "model.classifier.bias",
    }


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: lora(bert(), rank=0), "rank"),
        (lambda: lora(bert(), targets=["nothing"]), "targets"),
        (lambda: lora(bert(), targets="everything"), "targets"),  # type: ignore[arg-type]
        (lambda: lora(lora(bert())), "adapter already"),
        (lambda: lora(nn.Linear(3, 2)), "no model of transformers"),
        (lambda: train_head(llama()), "no head"),
        (lambda: train_last(bert(), 3), "num_layers"),
    ],
)
def test_what_cannot_be_tuned_is_refused(attempt: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        attempt()


def test_only_what_a_run_trained_is_saved(tmp_path: Path) -> None:
    adapted, plain = lora(vit(), rank=2), train_head(vit())

    def trained(module: nn.Module, name: str) -> RunRecord:
        task = Task(module, iid(TRANSFORMERS["vit"].records(8), 2))
        return run(Recipe(task, FedAvg(), Gaussian(sigma=1, batch_size=2), 1, 1, cohort=1), tmp_path / name)

    record = trained(adapted, "adapted")
    with pytest.raises(InputError, match="same LoRA"):
        save_adapter(record, lora(vit(), rank=3), tmp_path / "adapter")
    record = trained(plain, "plain")
    with pytest.raises(InputError, match="save_merged"):
        save_adapter(record, plain, tmp_path / "adapter")
    save_merged(record, plain, tmp_path / "whole")
    head = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "whole").classifier.weight
    assert head.equal(record.load_model()["model.classifier.weight"])


def test_a_model_with_other_weights_than_its_configuration_says_is_refused(tmp_path: Path) -> None:
    model: Any = vit()
    model.model.config.num_hidden_layers = 3
    model.model.save_pretrained(tmp_path / "short")
    with pytest.raises(InputError, match="outside of the head"):
        image_classifier(tmp_path / "short")
    (tmp_path / "short" / "model.safetensors").rename(tmp_path / "short" / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        image_classifier(tmp_path / "short")
