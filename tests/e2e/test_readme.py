"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dpfed import RunRecord
from dpfed.__main__ import main

README = (Path(__file__).parents[2] / "README.md").read_text()
SHORT = {
    "run": ["--rounds", "1", "--mechanism.batch-size", "16", "--engine.device", "cpu"],
    "bench": ["--device", "cpu", "--seconds", "0.01"],
    "audit": ["--trials", "200", "--rounds", "2"],
}
COMMANDS = re.findall(r"^dpfed .*$", README, re.MULTILINE)


def test_the_python_example_runs_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    record = RunRecord.open("runs/mine")
    assert record.ledger.epsilon(1e-5) <= 4
    assert record.summary()["final_accuracy"] > 0.8
    said = capsys.readouterr().out
    assert "DP-FedAdamW" in said
    assert "epsilon = " in said


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, the training ones shortened to one round and without a GPU."""
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 17
    main(["run", "quickstart", "--rounds", "1", "--mechanism.batch-size", "16"])
    for command in COMMANDS:
        words = shlex.split(command, comments=True)[1:]
        if words[0] == "run" and "--help" in words:
            with pytest.raises(SystemExit) as end:
                main(words)
            assert end.value.code == 0
            continue
        main([*words, *SHORT.get(words[0], [])])
    assert "sigma = 1.2340" in capsys.readouterr().out
