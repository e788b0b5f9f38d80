"""What docs/bring-your-own.md shows works as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfed import FlatModel, InputError, RunRecord

PAGE = (Path(__file__).parents[2] / "docs" / "bring-your-own.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What there is after the examples of the page, one after the other."""
    pytest.importorskip("peft")
    after: dict[str, Any] = {}
    with chdir(tmp_path_factory.mktemp("own")):
        for number, example in enumerate(EXAMPLES):
            exec(compile(example, f"bring-your-own.md, example {number + 1}", "exec"), after)
            after |= {f"{name} {number}": after.get(name) for name in ("model", "pictures")}
        yield after


def test_every_example_runs(names: dict[str, Any]) -> None:
    assert all(RunRecord.open(f"runs/{name}").finished for name in ("plain", "lora", "reviews", "language"))
    assert RunRecord.open("runs/plain").rows[-1]["accuracy"] > 0.5
    assert 0 < RunRecord.open("runs/reviews").ledger.epsilon(1e-5) < float("inf")

    record, model = RunRecord.open("runs/lora"), FlatModel(names["model 2"])
    ours = model.output(record.load_model(), {"x": names["pictures 2"]["x"][0]})
    pixels = names["pixels"](names["pictures 2"]["x"][:1])
    for theirs in (names["adapted"], names["merged"]):
        torch.testing.assert_close(theirs.eval()(pixel_values=pixels).logits, ours, rtol=1e-5, atol=1e-5)
    assert names["records"]["y"][0].tolist().count(-100) == 4


def test_the_ways_out_of_batch_norm(names: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 8, 8)
    FlatModel(names["trainable"])
    with pytest.raises(InputError, match="BatchNorm2d"):
        FlatModel(names["net"])
    FlatModel(names["fused"])
    torch.testing.assert_close(names["fused"](x), names["net"](x), rtol=1e-5, atol=1e-5)


def test_the_page_counts_right() -> None:
    from dpfed.models import configuration, text_classifier, train_last

    with torch.device("meta"):
        model = train_last(text_classifier(configuration("bert-base"), 2), 1)
    assert f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,} parameters" in PAGE
