"""Bad input gets one paragraph that names the field, the value and the remedy; exit code 2; and loses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpfed import (
    AsReleased,
    FedAvg,
    FedAvgLS,
    Federation,
    Gaussian,
    InputError,
    Plain,
    Recipe,
    RunRecord,
    Task,
    by_user,
    dirichlet,
    from_clients,
    iid,
    pad_crop_flip,
    run,
    shards,
)
from dpfed.__main__ import main

X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def spoiled(value: float) -> torch.Tensor:
    return torch.cat([X[:7], torch.full((1, 4), value), X[8:]])


def recipe(module: nn.Module | None = None, x: torch.Tensor = X, y: torch.Tensor = Y, **changes: Any) -> Recipe:
    task = Task(module or nn.Linear(4, 3), iid((x, y), num_clients=4))
    whole: dict[str, Any] = {"rounds": 2, "local_steps": 1, "cohort": 2, **changes}
    return Recipe(task, FedAvg(), Gaussian(sigma=1.0, batch_size=4), **whole)


def pool(*clients: list[int]) -> Federation:
    return Federation({"x": X, "y": Y}, tuple(torch.tensor(rows, dtype=torch.long) for rows in clients))


class Remembers(nn.Linear):
    """A running mean of its inputs, by which it centres them: written in place, or anew."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.in_place = in_place

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mean = 0.9 * self.mean + 0.1 * input.detach().mean(0)
        self.mean = self.mean.copy_(mean) if self.in_place else mean
        return super().forward(input - self.mean)


CASES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "BatchNorm": (lambda: recipe(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))), ["layer '1'", "GroupNorm"]),
    "running InstanceNorm": (lambda: recipe(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)), ["track_running"]),
    "a buffer written anew": (lambda: recipe(nn.Sequential(Remembers(False))), ["buffer '0.mean'", "Leave the buffer"]),
    "a buffer written in place": (lambda: recipe(nn.Sequential(Remembers(True))), ["buffer '0.mean'", "Leave the buffer"]),
    "AlphaDropout": (lambda: recipe(nn.Sequential(nn.AlphaDropout(0.1), nn.Linear(4, 3))), ["AlphaDropout", "0.1"]),
    "nothing to train": (lambda: recipe(nn.Linear(4, 3).requires_grad_(False)), ["requires_grad"]),
    "NaN": (lambda: recipe(x=spoiled(math.nan)), ["'x'", "record 7"]),
    "Inf": (lambda: recipe(x=spoiled(math.inf)), ["'x'", "record 7"]),
    "label too large": (lambda: recipe(y=Y + 1), ["1 to 3", "0 to 2"]),
    "label negative": (lambda: recipe(y=Y - 1), ["-1 to 1"]),
    "label a float": (lambda: recipe(y=Y.float()), ["float32"]),
    "wrong shape": (lambda: recipe(nn.Linear(5, 3)), ["(4,)", "first layer"]),
    "no clients": (lambda: from_clients([]), ["no clients"]),
    "no records": (lambda: iid((X[:0], Y[:0]), num_clients=1), ["0 records"]),
    "an empty client": (lambda: pool([0, 1], []), ["clients[1]", "no records"]),
    "a shared record": (lambda: pool([0, 1], [1, 2]), ["clients[1]", "record 1", "client 0"]),
    "a record twice": (lambda: pool([0, 1, 1]), ["record 1", "the same client"]),
    "a row too many": (lambda: pool([0, 40]), ["row 40"]),
    "equal records": (lambda: from_clients([(X[:5], Y[:5]), (X[3:9], Y[3:9])]), ["clients[1]", "equal_records=True"]),
    "columns unlike": (lambda: from_clients([(X, Y), (X[:, :3], Y)]), ["clients[1]", "shapes"]),
    "lengths unlike": (lambda: Federation({"x": X, "y": Y[:30]}, (torch.arange(3),)), ["lengths"]),
    "no target": (lambda: iid({"x": X}, num_clients=2), ["'y'"]),
    "not data": (lambda: iid(3, num_clients=2), ["int"]),
    "too many clients": (lambda: iid((X, Y), num_clients=41), ["41", "1 to 40"]),
    "alpha 0": (lambda: dirichlet((X, Y), 4, alpha=0.0), ["alpha", "0.1"]),
    "too many shards": (lambda: shards((X, Y), 40), ["80"]),
    "users too few": (lambda: by_user((X, Y), [1, 2]), ["users", "40"]),
    "a misspelt switch": (lambda: replace(recipe(), algorithm=FedAvgLS(where="sever")), ["algorithm.where", "client_step"]),
    "no rounds": (lambda: recipe(rounds=0), ["rounds", "0"]),
    "delta": (lambda: recipe(delta=1.0), ["delta", "1.0"]),
    "cohort": (lambda: recipe(cohort=9), ["cohort", "9", "4"]),
    "device": (lambda: recipe(engine=replace(recipe().engine, device="gpu")), ["engine.device", "cuda"]),
    "neither sigma nor epsilon": (lambda: Gaussian(), ["epsilon", "sigma"]),
    "both": (lambda: Gaussian(epsilon=1.0, sigma=1.0), ["not both"]),
    "epsilon": (lambda: Gaussian(epsilon=-1.0), ["epsilon", "-1.0"]),
    "sigma": (lambda: Gaussian(sigma=math.nan), ["sigma", "nan"]),
    "no clipping under noise": (lambda: Gaussian(sigma=1.0, clip=math.inf), ["clip", "inf"]),
    "batch": (lambda: Plain(batch_size=0), ["batch_size", "0"]),
    "a misspelt sampling": (lambda: Plain(sampling="poison"), ["mechanism.sampling", "'poison'", "'shuffled'"]),
    "passes under noise": (lambda: private(sampling="shuffled"), ["mechanism.sampling", "amplified", "Take 'poisson'"]),
    "a misspelt clipping": (lambda: private(clipping="blok"), ["mechanism.clipping", "'adaptive'"]),
    "variants that are alike": (lambda: private(augmentations=2), ["mechanism.augmentations", "augment"]),
    "no variant": (lambda: private(augmentations=0), ["augmentations", "0"]),
    "quantile": (lambda: private(quantile=1.0), ["quantile", "1.0", "median"]),
    "automatic to no norm": (lambda: Gaussian(sigma=0.0, clip=math.inf, clipping="automatic"), ["clip", "inf", "'flat'"]),
    "each without a target": (lambda: private(calibration="each"), ["calibration", "epsilon"]),
    "each in a shared sum": (
        lambda: Gaussian(epsilon=1.0, calibration="each", noise="distributed"),
        ["calibration", "local noise"],
    ),
    "clients in a shared sum": (lambda: private(unit="client", noise="distributed"), ["unit", "'local'"]),
    "clients by tensor": (lambda: private(unit="client", clipping="block"), ["unit", "'block'"]),
    "clients by size": (lambda: replace(private(unit="client"), weighting="examples"), ["weighting", "uniform"]),
    "clients with a limit": (lambda: replace(private(unit="client"), max_participations=9), ["max_participations", "secret"]),
    "coins with a limit": (lambda: recipe(cohort_sampling="poisson", max_participations=9), ["max_participations", "secret"]),
    "limit": (lambda: recipe(max_participations=0), ["max_participations", "0"]),
    "budget": (lambda: recipe(budget=0.0), ["budget", "0.0"]),
    "average": (lambda: recipe(average_decay=1.0), ["average_decay", "0.9"]),
    "released without a clip": (lambda: AsReleased(clip=math.inf), ["clip", "inf"]),
    "a column of keys": (lambda: keyed(), ["'key'", "random key"]),
    "moved too far": (lambda: moved(), ["pad", "(2, 2)", "5"]),
}


def private(**fields: Any) -> Recipe:
    return replace(recipe(), mechanism=Gaussian(sigma=1.0, batch_size=4, **fields))


def keyed() -> Recipe:
    return replace(recipe(), task=Task(nn.Linear(4, 3), iid({"x": X, "y": Y, "key": Y}, num_clients=4)))


def moved() -> Recipe:
    module, pool = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), iid((X.view(-1, 1, 2, 2), Y), num_clients=4)
    return replace(recipe(), task=Task(module, pool, augment=pad_crop_flip(5)))


@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_remedy(name: str, tmp_path: Path) -> None:
    make, words = CASES[name]
    with pytest.raises(InputError) as refusal:
        run(make(), tmp_path / "run")
    message = str(refusal.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert 30 < len(message) < 500
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_a_learning_rate_that_explodes_is_said_and_the_rows_stay(tmp_path: Path) -> None:
    wild = replace(recipe(rounds=50), algorithm=FedAvg(lr=1e30, weight_decay=1e20))
    with pytest.raises(InputError, match=r"algorithm.lr: .* round"):
        run(wild, tmp_path / "run")
    assert RunRecord.open(tmp_path / "run").ledger.clients()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The command line ends with exit code 2 and a panel on the error stream."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


SHORT = ("run", "fashion/DP-FedAvg", "--rounds", "3", "--local-steps", "1", "--cohort", "2", "--mechanism.batch-size", "8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fly",), "there is no 'fly'"),
        (("run", "nowhere/DP-FedAvg"), "there is no 'nowhere/DP-FedAvg'"),
        (("run", "quickstart", "--algorithm.gama", "1"), "--algorithm.gama: no such field"),
        (("run", "quickstart", "--rounds", "0"), "rounds: must be at least 1"),
        (("run", "quickstart", "--cohort", "1000"), "1000 clients a round"),
        (("run", "quickstart", "--out"), "--out: needs a value"),
        (("resume", "nowhere"), "there is no run here"),
        (("ledger", "nowhere"), "there is no run here"),
        (("calibrate", "--num-examples", "100", "--steps", "10", "--epsilon", "-1"), "epsilon"),
        ((*SHORT, "--out", "/proc/here"), "/proc/here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_command_line_refuses(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *words)


def test_a_wrong_type_names_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(("run", "quickstart", "--rounds", "many"))
    assert end.value.code == 2
    assert "--rounds" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_and_the_ledger_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    main((*SHORT, "--out", str(folder)))
    assert "already" in refused(capsys, *SHORT, "--out", str(folder))
    ledger, model = (folder / "ledger.jsonl").read_bytes(), (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    checkpoint = (folder / "checkpoint.safetensors").read_bytes()
    flipped = bytearray(checkpoint)
    flipped[-5] ^= 4
    for damaged in (checkpoint[:-9], bytes(flipped), b"", b"not a checkpoint at all"):
        (folder / "checkpoint.safetensors").write_bytes(damaged)
        assert "start again from round 0" in refused(capsys, "resume", str(folder))
        assert (folder / "ledger.jsonl").read_bytes() == ledger
    (folder / "checkpoint.safetensors").unlink()
    main(("resume", str(folder)))
    assert (folder / "model.safetensors").read_bytes() == model, "from round 0 again, to the same bits"
    assert (folder / "ledger.jsonl").read_bytes() == ledger, "and charged once"


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    run(recipe(), tmp_path / "run")
    with pytest.raises(InputError, match="fingerprint"):
        run(recipe(x=X + 1), tmp_path / "run", resume=True)
    with pytest.raises(InputError, match="local_steps"):
        run(recipe(local_steps=2), tmp_path / "run", resume=True)


def test_a_run_of_ones_own_objects_is_resumed_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(recipe(), tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    assert "resume=True" in refused(capsys, "resume", str(tmp_path / "run"))
