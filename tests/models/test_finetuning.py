"""Tasks on public data sets, from files in their true layouts and models in folders, through to a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from dpfed import FedAvg, Gaussian, InputError, Pictures, Recipe, Sentences, Tuning, run
from dpfed.catalogue import named_recipe
from dpfed.models import configuration
from dpfed.recipe import from_json, to_json
from dpfed.tasks.finetuning import expectations
from tests.unit import layouts

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    ViTForImageClassification(ViTConfig(image_size=48, patch_size=16, **SMALL)).save_pretrained(folder)
    ViTImageProcessorPil(image_mean=MEAN, image_std=STD, size={"height": 48, "width": 48}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "a", "charming", "journey", "bleak", "'", "s"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    config = BertConfig(vocab_size=len(words), max_position_embeddings=32, **SMALL)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def trained(task: Any, folder: Path) -> dict[str, Any]:
    mechanism = Gaussian(sigma=1.0, batch_size=2)
    return run(Recipe(task, FedAvg(lr=0.01), mechanism, rounds=1, local_steps=1, cohort=2), folder / "run").rows[-1]


@pytest.mark.parametrize("what", ["lora", "ffa-lora", "head", "last", "all"])
def test_a_pretrained_vit_on_cifar(what: Any, vit: Path, tmp_path: Path) -> None:
    layouts.cifar10(tmp_path)
    task = Pictures("cifar10", str(vit), Tuning(what, rank=2), num_clients=3, root=str(tmp_path))
    assert {"accuracy", "loss", "epsilon"} <= set(trained(task, tmp_path))
    names = [part.name for part in task.build(0)[0].layout.parts]
    assert any("classifier" in name for name in names), "the new head is always trained"
    assert any("lora_B" in name for name in names) == ("lora" in what)
    assert any("lora_A" in name for name in names) == (what == "lora")
    assert any("patch_embeddings" in name for name in names) == (what == "all")


def test_pixels_are_made_into_what_the_model_was_trained_on(vit: Path, tmp_path: Path) -> None:
    assert expectations(str(vit)) == (tuple(MEAN), tuple(STD), 48)
    normalise = Pictures("cifar10", str(vit)).module(0)[0]  # type: ignore[index]
    black = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    assert normalise(black).shape == (1, 3, 48, 48)
    torch.testing.assert_close(normalise(black)[0, :, 0, 0], -torch.tensor(MEAN) / torch.tensor(STD))


@pytest.mark.parametrize("model", ["tanh-cnn", "vit-tiny"])
def test_models_by_name_take_grey_pictures(model: str, tmp_path: Path) -> None:
    layouts.fashion_mnist(tmp_path)
    task = Pictures("fashion_mnist", model, num_clients=2, root=str(tmp_path), pad=2, metrics=("macro_accuracy",))
    assert "macro_accuracy" in trained(task, tmp_path)


@pytest.mark.parametrize(("model", "side"), [("resnet-18", 64), ("vit-base", 224), ("swin-tiny", 224)])
def test_the_size_that_a_model_by_name_sees(model: str, side: int) -> None:
    with torch.device("meta"):
        normalise, inner = Pictures("tiny_imagenet", model, Tuning("head")).module(0)  # type: ignore[misc]
    assert normalise.size == (None if side == 64 else side)
    assert list(inner.parameters())[-1].shape[0] == 200


@pytest.mark.parametrize("data", ["sst2", "mrpc", "mnli"])
def test_a_pretrained_bert_on_glue(data: Any, bert: Path, tmp_path: Path) -> None:
    layouts.glue(tmp_path, data)
    task = Sentences(data, str(bert), tuning=Tuning(rank=2), length=16, num_clients=2, root=str(tmp_path))
    row = trained(task, tmp_path)
    assert "accuracy" in row
    assert ("f1" in row) == (data == "mrpc")


def test_the_catalogue_has_them_and_a_file_brings_them_back() -> None:
    recipe = named_recipe("cifar100/DP-FedAdamW")
    assert recipe.task == Pictures("cifar100")
    changed = replace(recipe, task=replace(recipe.task, tuning=Tuning("last", layers=3)))
    assert from_json(to_json(changed)) == changed
    assert named_recipe("sst2/SGD").task == Sentences("sst2")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.*preprocessor_config\.json"):
        Pictures("cifar10", str(tmp_path)).module(0)
    with pytest.raises(InputError, match="CIFAR-10: not complete"):
        Pictures("cifar10", "tanh-cnn", root=str(tmp_path)).build(0)
    with pytest.raises(InputError, match="tokenizer"):
        Sentences("sst2", str(tmp_path), root=str(tmp_path)).build(0)
    with pytest.raises(InputError, match="there is no"):
        configuration("resnet-152")  # type: ignore[arg-type]
