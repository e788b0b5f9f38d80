"""What docs/data.md shows works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfed import RunRecord
from dpfed.__main__ import main
from dpfed.models import configuration, image_classifier, text_classifier
from tests.unit import layouts

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^dpfed .*$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the page speaks of, small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPFED_DATA", str(tmp_path / "sets"))
    layouts.cifar100(tmp_path / "sets")
    layouts.glue(tmp_path / "sets", "rte")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhe\nran\n.\n")
    layouts.class_folders(tmp_path / "pictures")
    (tmp_path / "patients.csv").write_text("age,weight,hospital,ill\n60,70,north,1\n50,80,south,0\n40,60,north,0\n")
    (tmp_path / "reviews.jsonl").write_text('{"text": "fine", "stars": 4}\n{"text": "bad", "stars": 1}\n')


def ran(example: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(example, "data.md", "exec"), names)
    return names


def test_every_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pictures, texts, _, own, _ = map(ran, EXAMPLES)
    assert isinstance(pictures["train"], dict)
    assert pictures["train"]["x"].dtype == torch.uint8
    assert RunRecord.open("runs/pictures").finished
    assert RunRecord.open("runs/ready").finished
    assert isinstance(texts["train"], dict)
    assert texts["train"]["input_ids"].shape == (2, 64)
    assert own["hospitals"] == ["north", "south", "north"]
    assert repr(own["federation"]) == "Federation(2 clients, 3 records, 1 to 2 each)"
    row = RunRecord.open("runs/fair").rows[-1]
    assert row["worst_client_accuracy"] <= row["accuracy"]
    assert row["accuracy"] > 0.7
    said = capsys.readouterr().out
    assert "DP-FedAvg" in said
    assert "macro_accuracy" in said


def test_the_command_shows_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = (command for command in COMMANDS if command.startswith("dpfed data"))
    main(shlex.split(command)[1:])
    said = capsys.readouterr().out
    shown = [line for line in PAGE.splitlines() if re.match(r" +\d+ +\d+ +- ", line) or line.startswith("50 clients")]
    assert len(shown) == 4
    assert all(line in said for line in shown)
    assert (tmp_path / "holdings.png").stat().st_size > 5000


def test_the_ready_made_tasks_run_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shortened, on small data and with small models in place of FOLDER."""
    pytest.importorskip("transformers")
    size = {"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 48}
    vit: Any = image_classifier(configuration("vit-tiny", **size, image_size=32, patch_size=16), 10).model
    vit.save_pretrained("cifar100")
    Path("cifar100/preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}')
    words = Path("bert/vocab.txt").read_text()
    made = configuration("bert-base", **size, num_attention_heads=2, vocab_size=len(words.split()))
    bert: Any = text_classifier(made, 2).model
    bert.save_pretrained("rte")
    Path("rte/vocab.txt").write_text(words)
    runs = [command for command in COMMANDS if command.startswith("dpfed run")]
    assert len(runs) == 3
    short = "--rounds 1 --local-steps 1 --cohort 1 --task.num-clients 2 --mechanism.batch-size 1 --mechanism.epsilon 50"
    for number, command in enumerate(runs):
        task = command.split()[2].partition("/")[0]
        main([*shlex.split(command.replace("FOLDER", task))[1:], *short.split(), "--out", f"runs/{number}"])
        assert RunRecord.open(f"runs/{number}").finished
    with pytest.raises(SystemExit) as end:
        main(["run", "sst2/DP-FedAvg"])
    assert end.value.code == 2
    assert "--task.model FOLDER" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        (["data", "nothing"], "there is no 'nothing'"),
        (["data", "quickstart", "--figure", "a.gif"], "a.gif"),
        (["data", "quickstart", "--task.color", "red"], "--task.color"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert reason in " ".join(capsys.readouterr().err.replace("│", " ").split())
    main(["data"])
    assert "usage" in capsys.readouterr().out


def test_the_list_says_which_data_sets_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["CIFAR-100", "there"] for line in lines)
    assert any(line.split()[:3] == ["CIFAR-10", "not", "there;"] for line in lines)
