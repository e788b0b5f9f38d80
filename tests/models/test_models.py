"""Every model beside transformers' own forward pass, and its gradients by record beside one record after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dpfed import InputError
from dpfed.flat import FlatModel, Records
from dpfed.models import (
    configuration,
    image_classifier,
    lora,
    resnet18,
    tanh_cnn,
    text_classifier,
    train_all,
    wide_resnet,
)
from dpfed.privacy import Sums, survey
from dpfed.tasks.citation import GraphConvolution
from tests.models.tiny import OTHERS, TRANSFORMERS, Family

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::DeprecationWarning:torch")


def moved(module: nn.Module) -> nn.Module:
    """Away from the start, where B = 0 and A has no gradient; not so far that rounding is blown up on its way through."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.05 * torch.randn(p.shape))
    return module


def gradients_agree(family: Family, module: nn.Module) -> None:
    torch.manual_seed(0)
    model = FlatModel(moved(module), family.criterion)
    records = family.records(6)
    theta = torch.stack([model.theta0(), model.theta0() * 1.05])
    examples, mask = {k: v.unflatten(0, (2, 3)) for k, v in records.items()}, torch.ones(2, 3, dtype=torch.bool)

    def loss(theta: Tensor, example: Records) -> Tensor:
        return model.loss(model.layout.views(theta), example)

    mapped = vmap(vmap(grad(loss), in_dims=(None, 0)))(theta, examples)
    whole = survey(model, {k: v[0] for k, v in records.items()}, times_smaller=1)
    clip = float(mapped.norm(dim=-1).median())
    found, _ = Sums(model, whole).clipped([(1.0, theta)], examples, mask, clip)
    expected = (mapped * (clip / mapped.norm(dim=-1, keepdim=True)).clamp(max=1)).sum(1)
    assert (found - expected).norm() <= 1e-4 * expected.norm(), "by factors"
    for number in range(6):
        own, row = theta[number // 3].clone().requires_grad_(), {k: v[number] for k, v in records.items()}
        (alone,) = torch.autograd.grad(loss(own, row), own)
        found = mapped[number // 3, number % 3]
        assert (found - alone).norm() <= 1e-5 * alone.norm(), f"record {number}"
        assert alone.norm() > 1e-3


@pytest.mark.parametrize("trained", ["lora", "all-linear", "all"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_gradients_by_record_of_transformers(name: str, trained: str) -> None:
    family = TRANSFORMERS[name]
    if trained == "all":
        module = train_all(family.build())
    else:
        module = lora(family.build(), rank=2, targets="attention" if trained == "lora" else "all-linear")
    gradients_agree(family, module)


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_by_record_of_other_models(name: str) -> None:
    gradients_agree(OTHERS[name], OTHERS[name].build())


def plain(module: nn.Module) -> Any:
    """The same weights under transformers' own attention and masks."""
    ours = module.model
    theirs = type(ours)._from_config(ours.config, attn_implementation="eager")
    theirs.load_state_dict(ours.state_dict())
    return theirs.eval()


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_forward_pass_is_that_of_transformers(name: str) -> None:
    family = TRANSFORMERS[name]
    module = moved(family.build())
    model, records = FlatModel(module, family.criterion), family.records(4)
    ours = torch.cat(
        [model.output(model.layout.views(model.theta0()), {k: v[i] for k, v in records.items()}) for i in range(4)]
    )
    inputs = {"pixel_values" if k == "x" else k: v for k, v in records.items() if k != "y"}
    inputs = {k: v.long() if v.dtype in (torch.bool, torch.int32) else v for k, v in inputs.items()}
    with torch.no_grad():
        theirs: Tensor = plain(module)(**inputs).logits
    if name == "llama":  # behind the end of a text, what it says is nobody's concern
        ours, theirs = (x[records["attention_mask"]] for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert theirs.std() > 0.01


def test_the_loss_of_a_sequence_is_that_of_transformers() -> None:
    family = TRANSFORMERS["llama"]
    module = moved(family.build())
    records = family.records(3)
    model = FlatModel(module, family.criterion)
    own = plain(module)
    for i in range(3):
        row = {k: v[i] for k, v in records.items()}
        theirs = own(row["input_ids"][None].long(), row["attention_mask"][None].long(), labels=row["y"][None]).loss
        torch.testing.assert_close(model.loss(model.layout.views(model.theta0()), row), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_many_records_are_judged_as_one_after_the_other(name: str) -> None:
    family = TRANSFORMERS[name]
    model, records = FlatModel(moved(family.build()), family.criterion), family.records(5)
    theta = model.theta0()
    alone = [model.loss(model.layout.views(theta), {k: v[i] for k, v in records.items()}).item() for i in range(5)]
    assert model.evaluate(theta, records, at_once=2)["loss"] == pytest.approx(sum(alone) / 5, rel=1e-5)


def count(module: nn.Module, trained: bool = False) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


@pytest.mark.parametrize(
    ("name", "num_classes", "published"),
    [
        ("vit-tiny", 1000, 5_717_416),
        ("vit-base", 1000, 86_567_656),
        ("swin-tiny", 1000, 28_288_354),
        ("swin-base", 1000, 87_768_224),
    ],
)
def test_parameter_counts_of_vision_models(name: Any, num_classes: int, published: int) -> None:
    with torch.device("meta"):
        assert count(image_classifier(configuration(name), num_classes)) == published


def test_depths_widths_and_heads_are_those_of_the_dp_fedadamw_paper() -> None:
    tiny, large = configuration("swin-tiny"), configuration("swin-base")
    assert (tiny.depths, tiny.embed_dim, tiny.num_heads) == ([2, 2, 6, 2], 96, [3, 6, 12, 24])
    assert (large.depths, large.embed_dim, large.num_heads) == ([2, 2, 18, 2], 128, [4, 8, 16, 32])
    for config in (configuration("vit-base"), configuration("roberta-base")):
        assert (config.num_hidden_layers, config.num_attention_heads) == (12, 12)
        assert (config.hidden_size, config.intermediate_size) == (768, 3072)


def test_parameter_counts_of_language_models() -> None:
    from dpfed.models import causal_lm

    with torch.device("meta"):
        bert, roberta = (text_classifier(configuration(name), 2) for name in ("bert-base", "roberta-base"))
        assert count(bert) - 2 * 769 == 108_310_272  # bert-base-cased with its pooler
        assert count(roberta) - 2 * 769 == 124_645_632  # its head has a layer of the pooler's size
        assert count(causal_lm(configuration("tinyllama"))) == 1_100_048_384


def test_parameter_counts_of_other_models() -> None:
    with torch.device("meta"):
        assert count(resnet18(10)) == 11_173_962
        assert count(resnet18(100)) == 11_220_132
        assert count(wide_resnet(10)) == 2_748_890
        assert count(tanh_cnn()) == 411_466
        assert count(GraphConvolution(128, 40)) == 173_695


def test_models_say_what_they_do_not_know(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="vit-base"):
        configuration("vit-giant")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="num_classes"):
        image_classifier(configuration("vit-tiny"), 1)
    with pytest.raises(InputError, match="dropout"):
        image_classifier(configuration("vit-tiny"), 3, dropout=1.0)
    with pytest.raises(InputError, match=r"config\.json"):
        image_classifier(tmp_path, 3)
    with pytest.raises(InputError, match="groups"):
        resnet18(10, groups=3)
    with pytest.raises(InputError, match="depth"):
        wide_resnet(10, depth=15)
