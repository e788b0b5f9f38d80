"""Dropout from a record's own key: what is drawn, when, and that nobody else's record matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dpfed import FedAvg, FlatModel, Gaussian, InputError, Recipe, Simulation, Task, fast, iid, run
from dpfed.dropout import drawing, dropped, with_keyed_dropout
from dpfed.flat import Records
from dpfed.models import lora
from tests.models.tiny import TRANSFORMERS, bert, swin

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::DeprecationWarning:torch")


def net(p: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(p), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 3))


def test_zero_with_probability_p_and_the_mean_stays() -> None:
    for p in (0.0, 0.1, 0.7, 1.0):
        with drawing(torch.tensor(11)):
            found = dropped(torch.ones(100_000), p)
        assert abs(float((found == 0).float().mean()) - p) < 0.006
        assert p == 1 or abs(float(found.mean()) - 1) < 0.02
    with drawing(torch.tensor(11)):
        nowhere = dropped(torch.zeros(2, requires_grad=True), 1.0).sum()
    (slope,) = torch.autograd.grad(nowhere, [nowhere], allow_unused=True)
    assert slope is not None


def test_every_call_and_every_key_has_its_own_mask() -> None:
    def masks(key: int) -> Tensor:
        with drawing(torch.tensor(key)):
            return torch.stack([dropped(torch.ones(4000), 0.5) for _ in range(3)])

    one, other = masks(3), masks(4)
    assert one.equal(masks(3))
    assert (torch.corrcoef(torch.cat([one, other])) - torch.eye(6)).abs().max() < 0.07


def test_channels_and_branches_share_a_coin() -> None:
    class DropPath(nn.Module):
        drop_prob = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return x

    module = nn.ModuleList([nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d(), DropPath()])
    assert with_keyed_dropout(module.eval())
    x = torch.ones(1, 64, 2, 3, 4)
    for n, layer in enumerate(module):
        with drawing(torch.tensor(n)):
            found = layer(x if n == 2 else x[..., 0] if n == 1 else x[..., 0, 0])
        shares = found.flatten(2).std(-1) if n < 3 else found.flatten(1).std(-1)
        assert not shares.any()
        assert n == 3 or found.std() > 0.9
    branch = module[3]
    kept = torch.stack([_under(key, branch, x).mean() for key in range(200)])
    assert set(kept.tolist()) == {0.0, 2.0}
    assert 70 < int((kept > 0).sum()) < 130


def _under(key: int, layer: nn.Module, x: Tensor) -> Tensor:
    with drawing(torch.tensor(key)):
        return layer(x)


def test_training_draws_and_judging_does_not() -> None:
    module = net()
    records = {"x": torch.randn(5, 4), "y": torch.arange(5) % 3}
    expected = nn.functional.cross_entropy(net(0.0)(records["x"]), records["y"]).item()
    model = FlatModel(module)
    theta, row = model.theta0(), {k: v[0] for k, v in records.items()}
    assert model.needs_key
    assert model.evaluate(theta, records)["loss"] == pytest.approx(expected, rel=1e-6)
    losses = {model.loss(model.layout.views(theta), row | {"key": torch.tensor(key)}).item() for key in (1, 1, 2, 3)}
    assert len(losses) == 3
    assert model.loss(model.layout.views(theta), row).item() not in losses


def test_outside_the_layers_are_torchs_own() -> None:
    module, untouched = net(), net()
    FlatModel(module)
    x = torch.randn(3, 4)
    torch.manual_seed(1)
    found = module.train()(x)
    torch.manual_seed(1)
    assert found.equal(untouched.train()(x))
    assert isinstance(module[1], nn.Dropout)


def of_vector(model: FlatModel) -> Callable[[Tensor, Records], Tensor]:
    return lambda theta, row: model.loss(model.layout.views(theta), row)


KEYED = {
    "vit": {"dropout": 0.2},
    "swin": {"dropout": 0.2},
    "roberta": {"dropout": 0.2},
    "bert": {"dropout": 0.2},
    "llama": {"dropout": 0.2},
}


@pytest.mark.parametrize("name", KEYED)
def test_masks_depend_on_the_record_alone(name: str) -> None:
    pytest.importorskip("peft")
    family = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = FlatModel(lora(family.build(**KEYED[name]), rank=2, dropout=0.3), family.criterion)
    records = family.records(6) | {"key": torch.arange(6)}
    theta = torch.stack([model.theta0(), model.theta0() + 0.05 * torch.randn(model.num_parameters)])
    batch = {k: v.unflatten(0, (2, 3)) for k, v in records.items()}
    found = vmap(vmap(grad(of_vector(model)), in_dims=(None, 0)))(theta, batch)
    quiet = vmap(vmap(grad(of_vector(model)), in_dims=(None, 0)))(theta, {k: v for k, v in batch.items() if k != "key"})
    for n in range(6):
        alone = grad(of_vector(model))(theta[n // 3], {k: v[n] for k, v in records.items()})
        assert (found[n // 3, n % 3] - alone).norm() <= 1e-5 * alone.norm()
        assert (quiet[n // 3, n % 3] - alone).norm() > 0.01 * alone.norm()


@pytest.mark.parametrize("setting", ["attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "drop_path"])
def test_each_dropout_of_a_transformer_acts(setting: str) -> None:
    pytest.importorskip("transformers")
    family = TRANSFORMERS["swin" if setting == "drop_path" else "bert"]
    torch.manual_seed(0)
    module: Any = swin() if setting == "drop_path" else bert()
    config = module.model.config
    setattr(config, "drop_path_rate" if setting == "drop_path" else setting, 0.5)
    again = type(module)(type(module.model)._from_config(config, attn_implementation="dpfed"))
    again.load_state_dict(module.state_dict())
    quiet, loud = FlatModel(module), FlatModel(again)
    row = {k: v[0] for k, v in family.records(2).items()} | {"key": torch.tensor(5)}
    theta = quiet.theta0() + 0.1
    assert not quiet.needs_key
    assert loud.needs_key
    assert of_vector(loud)(theta, row) != of_vector(quiet)(theta, row)
    assert loud.output(loud.layout.views(theta), row).equal(quiet.output(quiet.layout.views(theta), row))


def test_attention_drops_out_as_transformers_would() -> None:
    """In the mean over many keys, attention gives what it gives without dropout."""
    transformers = pytest.importorskip("transformers")
    from dpfed.fast import hugging_face_attention

    layer = transformers.models.bert.modeling_bert.BertSelfAttention(bert(dropout=0.3).model.config)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 3, 5, 8)

    def attend(key: Tensor) -> Tensor:
        with drawing(key):
            return hugging_face_attention(layer, q, k, v, None, is_causal=False)[0]

    found = vmap(attend)(torch.arange(4000))
    expected = hugging_face_attention(layer, q, k, v, None, is_causal=False)[0]
    error = (found.mean(0) - expected).abs() / (found.std(0) / 4000**0.5)
    assert error.max() < 5
    assert found.std(0).min() > 0.01


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.FeatureAlphaDropout(0.2)), "FeatureAlphaDropout"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "MultiheadAttention"),
        (nn.LSTM(4, 4, 2, dropout=0.3), "LSTM"),
    ],
)
def test_what_cannot_be_keyed_is_refused(module: nn.Module, words: str) -> None:
    with pytest.raises(InputError, match=words):
        FlatModel(module)


def test_attention_that_would_not_drop_out_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = bert(dropout=0.3).model.config
    eager = transformers.BertForSequenceClassification._from_config(config, attn_implementation="eager")
    with pytest.raises(InputError, match="attn_implementation='dpfed'"):
        FlatModel(eager)


def test_a_cohort_is_its_clients_one_by_one(tmp_path: Any) -> None:
    torch.manual_seed(0)
    federation = iid((torch.randn(40, 4), torch.arange(40) % 3), 4)
    ends: list[Tensor] = []
    for at_once in (1, 4):
        task, engine = Task(net(), federation), Simulation(clients_at_once=at_once)
        recipe = Recipe(task, FedAvg(lr=1.0), Gaussian(sigma=0.1, clip=5, batch_size=4), 2, 2, cohort=4, engine=engine)
        found = run(recipe, tmp_path / str(at_once)).load_model()
        ends.append(torch.cat([found[name].flatten() for name in sorted(found)]))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("net", "inductor"), ("bert", "aot_eager")])
def test_compiled_it_draws_the_same(name: str, backend: str) -> None:
    pytest.importorskip("peft")
    module = net() if name == "net" else lora(bert(dropout=0.2), rank=2, dropout=0.3)
    model, records = FlatModel(module), {"x": torch.randn(6, 4), "y": torch.arange(6) % 3}
    records = (records if name == "net" else TRANSFORMERS["bert"].records(6)) | {"key": torch.arange(6)}
    batch = {k: v.unflatten(0, (2, 3)) for k, v in records.items()}
    theta = model.theta0().expand(2, -1) + 0.01
    gradients = vmap(vmap(grad(of_vector(model)), in_dims=(None, 0)))
    expected = gradients(theta, batch)
    torch.compiler.reset()
    fast.for_dynamo()
    found = torch.compile(gradients, fullgraph=True, backend=backend)(theta, batch)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
