"""The flat vector, its map, and the block rule of the paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfed.flat import Blocks, FlatModel, Layout, Part


class SelfAttention(nn.Module):
    """Named and shaped as in transformers: separate query, key and value, with LoRA on one of them as PEFT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = 2, 3
        self.query = nn.ModuleDict(
            {
                "base_layer": nn.Linear(6, 6).requires_grad_(False),
                "lora_A": nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)}),
                "lora_B": nn.ModuleDict({"default": nn.Linear(2, 6, bias=False)}),
            }
        )
        self.key = nn.Linear(6, 6)
        self.value = nn.Linear(6, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.attention = SelfAttention()
        self.fused = nn.MultiheadAttention(6, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)


def test_the_papers_blocks_by_hand() -> None:
    layout = Layout.of(Net())
    sizes = [length for count, length in layout.blocks("paper").runs for _ in range(count)]
    expected = [30]  # the embedding
    expected += [18, 18, 3, 3] * 2  # key, value: two heads of weights, two heads of biases
    expected += [12] * 9 + [2] * 9  # the fused q|k|v of three heads: weight rows, bias
    expected += [42, 12, 28]  # its output, norm and head: weight and bias together
    expected += [12, 6, 6]  # LoRA A one block, B by head; behind all others
    assert sizes == expected
    assert [part.group for part in layout.parts[-2:]] == ["lora_A", "lora_B"]
    assert layout.group("lora_A") == slice(layout.num_coordinates - 24, layout.num_coordinates - 12)


@pytest.mark.parametrize("rule", ["paper", "tensor", "neuron", "none"])
def test_blocks_are_a_partition_and_mean_and_spread_round_trip(rule: Any) -> None:
    layout = Layout.of(Net())
    blocks = layout.blocks(rule)
    assert sum(count * length for count, length in blocks.runs) == layout.num_coordinates
    per_block = torch.randn(3, blocks.num_blocks, dtype=torch.float64)
    torch.testing.assert_close(blocks.mean(blocks.spread(per_block)), per_block)
    x = torch.randn(3, layout.num_coordinates, dtype=torch.float64)
    assert blocks.mean(x)[1].equal(blocks.mean(x[1]))
    counts = torch.tensor([length for count, length in blocks.runs for _ in range(count)])
    torch.testing.assert_close((blocks.mean(x) * counts).sum(-1), x.sum(-1))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=5), st.integers(0, 99))
def test_block_means_do_not_depend_on_the_order_inside_a_block(runs: list[tuple[int, int]], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    blocks = Blocks(tuple(runs))
    lengths = [length for count, length in runs for _ in range(count)]
    x = torch.randn(sum(lengths), generator=random, dtype=torch.float64)
    shuffled = torch.cat([part[torch.randperm(len(part), generator=random)] for part in x.split(lengths)])
    torch.testing.assert_close(blocks.mean(shuffled), blocks.mean(x))


def test_views_and_flatten_are_inverse() -> None:
    net = Net()
    model = FlatModel(net)
    theta = model.theta0()
    views = model.layout.views(theta)
    trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert set(views) == set(trainable)
    assert all(views[name].equal(p) for name, p in trainable.items())
    assert model.layout.flatten(views).equal(theta)
    assert model.layout.views(theta.expand(3, -1))["head.weight"].shape == (3, 4, 6)
    assert Layout((Part("scale", (), "weights"),)).views(torch.ones(1))["scale"].shape == ()


@pytest.mark.parametrize("sizes", [(16, 8), (3, 16, 5, 1, 24, 8, 7), (4,)])
def test_aligned_views_begin_where_a_gpu_reads_fast(sizes: tuple[int, ...]) -> None:
    layout = Layout(tuple(Part(f"part {i}", (1, size), "weights") for i, size in enumerate(sizes)))
    theta = torch.randn(2, sum(sizes))
    found = layout.aligned(theta)
    assert list(found) == list(layout.views(theta))
    for name, view in layout.views(theta).items():
        assert found[name].equal(view)
        assert found[name].storage_offset() % 8 == found[name].stride(0) % 8 == 0
        assert found[name][0].equal(layout.aligned(theta[0])[name])


def test_the_module_is_only_read() -> None:
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    model = FlatModel(module)
    theta = model.theta0()
    theta += 1
    model.evaluate(theta, {"x": torch.randn(7, 3), "y": torch.zeros(7, dtype=torch.long)})
    assert module.weight.equal(before)


def test_evaluate_is_the_mean_over_records_not_over_batches() -> None:
    module = nn.Linear(3, 2)
    model, x, y = FlatModel(module), torch.randn(7, 3), torch.arange(7) % 2
    output = module(x).detach()
    found = model.evaluate(model.theta0(), {"x": x, "y": y}, at_once=3)
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(output, y)), rel=1e-6)
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == y).float().mean()))


def test_named_inputs_and_outputs_with_logits() -> None:
    """As Hugging Face models want and give them."""

    class Output(dict[str, Tensor]):
        @property
        def logits(self) -> Tensor:
            return self["logits"]

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
            mask = attention_mask.unsqueeze(-1)
            return Output(logits=self.head((self.words(input_ids) * mask).sum(1) / mask.sum(1)))

    records = {"input_ids": torch.randint(0, 9, (6, 5)), "attention_mask": torch.ones(6, 5), "y": torch.arange(6) % 3}
    model = FlatModel(Text())
    model.check(records)
    assert model.evaluate(model.theta0(), records)["loss"] > 0


def test_a_model_with_its_own_criterion_reports_only_the_loss() -> None:
    model = FlatModel(nn.Linear(3, 1), lambda output, target: ((output.squeeze(1) - target) ** 2).mean())
    records = {"x": torch.randn(5, 3), "y": torch.randn(5)}
    model.check(records)
    assert set(model.evaluate(model.theta0(), records)) == {"loss"}
