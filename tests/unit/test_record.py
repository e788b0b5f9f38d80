"""Run folders: whatever is killed, torn, flipped, locked or full, no charge is lost and no wrong state is believed."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from dpfed.errors import InputError
from dpfed.ledger import Event, Ledger, Receipt
from dpfed.record import RunRecord, environment

RECIPE = {"name": "DP-FedAdamW", "seed": 0, "mechanism": {"sigma": 1.5, "clip": math.inf}, "rounds": 3}
EVENT = Event("poisson", 16, 1000, 1.5)


def receipts(t: int, clients: tuple[int, ...] = (0, 2)) -> list[Receipt]:
    return [Receipt(client, t, Counter({EVENT: 5})) for client in clients]


def begin(path: Path) -> RunRecord:
    return RunRecord.create(path, RECIPE, {"python": "3"}, 1e-5)


def charged(record: RunRecord) -> set[tuple[int, int]]:
    return {(receipt.client, receipt.t) for receipt in record.ledger}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


# What is written is what is read


def test_a_new_run_can_be_read_back(path: Path) -> None:
    begin(path)
    record = RunRecord.open(path)
    assert (record.recipe, record.environment, record.delta) == (RECIPE, {"python": "3"}, 1e-5)
    assert (record.rows, list(record.ledger), record.restore(), record.finished) == ([], [], None, False)


def test_the_environment_says_what_the_run_stood_on() -> None:
    here = environment()
    assert here["torch"] == torch.__version__
    assert here["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (here["device"], here["num_threads"]) == ("cpu", torch.get_num_threads())
    assert {"dpfed", "numpy", "platform", "num_cpus", "started"} <= here.keys()


texts = st.text().filter(lambda text: text not in ("inf", "-inf", "nan"))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=15)
@given(rows=st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=4))
def test_every_row_comes_back_as_it_was(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    record = begin(tmp_path_factory.mktemp("rows") / "run")
    rows = [row | {"t": t} for t, row in enumerate(rows)]
    for row in rows:
        record.append(row)
    assert repr(RunRecord.open(record.path).rows) == repr(rows)  # repr, because nan is not equal to itself


def test_infinity_is_written_as_valid_json(path: Path) -> None:
    record = begin(path)
    record.append({"t": 0, "epsilon": math.inf, "loss": math.nan, "low": -math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((path / "rows.jsonl").read_text(), parse_constant=refuse)
    assert line == {"t": 0, "epsilon": "inf", "loss": "nan", "low": "-inf"}
    assert RunRecord.open(path).rows[0]["epsilon"] == math.inf
    assert RunRecord.open(path).recipe["mechanism"]["clip"] == math.inf


@pytest.mark.parametrize("row", [{}, {"t": "1"}, {"t": True}, {"t": 0}, {"t": 5, "x": "nan"}, {"t": 5, "x": object()}])
def test_a_row_that_cannot_be_kept_is_refused_and_leaves_no_trace(path: Path, row: dict[str, Any]) -> None:
    record = begin(path)
    record.append({"t": 0})
    with pytest.raises(InputError):
        record.append(row)
    assert record.rows == RunRecord.open(path).rows == [{"t": 0}]


def test_rewind_drops_rows_and_keeps_charges(path: Path) -> None:
    record = begin(path)
    for t in range(4):
        record.charge(receipts(t))
        record.append({"t": t, "epsilon": math.inf})
    record.rewind(2)
    assert [row["t"] for row in record.rows] == [row["t"] for row in RunRecord.open(path).rows] == [0, 1]
    assert charged(RunRecord.open(path)) == {(client, t) for client in (0, 2) for t in range(4)}
    record.append({"t": 2})
    assert [row["t"] for row in RunRecord.open(path).rows] == [0, 1, 2]


def test_a_finished_run_is_not_rewound(path: Path) -> None:
    record = begin(path)
    record.append({"t": 0})
    record.save_model({"w": torch.ones(2)})
    record.rewind(1)  # nothing to drop
    with pytest.raises(InputError, match=r"finished.*model\.safetensors"):
        record.rewind(0)
    assert record.finished
    assert record.rows == RunRecord.open(path).rows == [{"t": 0}]


def test_the_summary_reads_the_ledger_and_the_rows(path: Path) -> None:
    record = begin(path)
    for t, accuracy in enumerate([0.2, None, 0.6, 0.5]):
        record.charge(receipts(t))
        record.append({"t": t, "accuracy": accuracy, "epsilon": 99.0, "seconds": 2.0, "bytes_up": 10 * t})
    record.append({"t": 4, "seconds": 1.5})
    summary = RunRecord.open(path).summary()
    ledger = Ledger()
    ledger.post([receipt for t in range(4) for receipt in receipts(t)])
    epsilon = ledger.epsilon(1e-5)
    assert 0 < epsilon < 5
    assert summary == {
        "name": "DP-FedAdamW",
        "final_accuracy": 0.5,
        "best_accuracy": 0.6,
        "epsilon": epsilon,
        "rounds": 5,
        "seconds": 9.5,
        "bytes_up": 15,
        "bytes_down": None,
    }
    assert record.statement() == record.ledger.statement(1e-5)
    assert "DP-FedAdamW" in record.table()
    assert "60.0" in record.table()


# Beginning a run


def test_a_folder_with_a_run_is_refused(path: Path) -> None:
    begin(path).append({"t": 0})
    before = contents(path)
    with pytest.raises(InputError, match=f"dpfed resume {path}"):
        begin(path)
    assert contents(path) == before


def test_a_folder_with_other_files_is_refused_and_kept_as_it_is(path: Path) -> None:
    path.mkdir()
    (path / "rows.jsonl").write_text("mine")
    with pytest.raises(InputError, match=r"rows\.jsonl"):
        begin(path)
    assert contents(path) == {"rows.jsonl": b"mine"}


def test_an_empty_folder_will_do(path: Path) -> None:
    path.mkdir()
    assert begin(path).recipe == RECIPE


def test_what_cannot_be_json_is_refused_before_anything_is_written(path: Path) -> None:
    for recipe in ({"name": object()}, {"name": "nan"}):
        with pytest.raises(InputError, match=r"recipe\.json"):
            RunRecord.create(path, recipe, {}, 1e-5)
    assert not path.exists()


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def ordinary_user() -> Iterator[None]:
    """The superuser may write everywhere, so be somebody else for a moment."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("num_bytes", [0, 5, 16, 40])
@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_no_half_written_run(tmp_path: Path, num_bytes: int, there: bool) -> None:
    path = tmp_path / "a" / "b"
    if there:
        path.mkdir(parents=True)
    with full_disk(num_bytes), pytest.raises(InputError, match=rf"{path}.*Name a folder"):
        begin(path)
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")}
    assert left == ({"a", "a/b", "a/b/lock"} if there else set())
    assert begin(path).recipe == RECIPE


def test_a_read_only_folder_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o555)
    with ordinary_user(), pytest.raises(InputError, match=r"a/run: cannot be written \(Permission denied\)"):
        begin(Path("a/run"))
    tmp_path.chmod(0o755)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_refused_by_name(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(InputError, match=str(path)):
        begin(path)
    assert path.read_text() == "mine"


# Reading what is damaged


def test_no_run_no_record(path: Path) -> None:
    with pytest.raises(InputError, match="no run here"):
        RunRecord.open(path)
    path.mkdir()
    (path / "recipe.json").write_text("{}")
    with pytest.raises(InputError, match="no run here"):
        RunRecord.open(path)


def full_run(path: Path) -> RunRecord:
    record = begin(path)
    for t in range(3):
        record.charge(receipts(t))
        record.append({"t": t, "accuracy": 0.5, "epsilon": math.inf})
    record.checkpoint({"theta": torch.arange(3.0), "step": torch.tensor(7)}, 3)
    record.close()
    return record


@pytest.mark.parametrize("name", ["recipe.json", "environment.json"])
def test_a_cut_description_is_refused_at_every_byte(path: Path, name: str) -> None:
    whole = full_run(path).recipe
    data = (path / name).read_bytes()
    for length in range(len(data)):
        (path / name).write_bytes(data[:length])
        if length == len(data) - 1:  # only the newline is gone
            assert RunRecord.open(path).recipe == whole
        else:
            with pytest.raises(InputError, match=name):
                RunRecord.open(path)
    (path / name).unlink()
    with pytest.raises(InputError, match=rf"{name}: cannot be read"):
        RunRecord.open(path)


def test_rows_cut_at_every_byte_lose_the_torn_row_only_and_can_go_on(path: Path) -> None:
    rows = full_run(path).rows
    data = (path / "rows.jsonl").read_bytes()
    for length in range(len(data) + 1):
        (path / "rows.jsonl").write_bytes(data[:length])
        record = RunRecord.open(path)
        whole = data[:length].count(b"\n")
        assert record.rows == rows[:whole]
        record.append({"t": 3})
        record.close()
        assert RunRecord.open(path).rows == [*rows[:whole], {"t": 3}]
        assert (path / "rows.jsonl").read_bytes().startswith(data[: data[:length].rfind(b"\n") + 1])


def test_a_ledger_cut_at_every_byte_loses_the_torn_charge_only_and_can_go_on(path: Path) -> None:
    begin(path).charge(receipts(0))
    data = (path / "ledger.jsonl").read_bytes()
    for length in range(len(data) + 1):
        (path / "ledger.jsonl").write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        if whole == 0:
            with pytest.raises(InputError, match=r"ledger\.jsonl: its first line, the delta, is missing"):
                RunRecord.open(path)
            continue
        record = RunRecord.open(path)
        assert charged(record) == ({(0, 0), (2, 0)} if whole == 2 else set())
        record.charge(receipts(0))
        record.close()
        assert (path / "ledger.jsonl").read_bytes() == data


def test_a_round_that_was_trained_and_not_charged_is_refused(path: Path) -> None:
    record = begin(path)
    for t in range(3):
        record.charge(receipts(t))
        record.append({"t": t, "clients": 2})
    record.close()
    lines = (path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    for missing, t in ((1, 0), (2, 1), (3, 2)):
        (path / "ledger.jsonl").write_bytes(b"".join(lines[:missing] + lines[missing + 1 :]))
        with pytest.raises(InputError, match=rf"ledger\.jsonl: holds no charge for round {t}, .* Put the file"):
            RunRecord.open(path)
    (path / "ledger.jsonl").write_bytes(b"".join(lines))
    assert len(RunRecord.open(path).rows) == 3


LINES = {
    "rows.jsonl": [b"", b"{", b"3", b"[]", b'{"t": 0}', b'{"t": 2.5}', b"{}", b"\xff", b'{"t": 9'],
    "ledger.jsonl": [
        *(b"", b"{", b"3", b"{}", b"\xff", b'{"t": 0, "clients": [0], "events": 3}'),
        b'{"t": 0, "clients": [0], "events": [["x", 1]]}',
        b'{"t": 0, "clients": [0], "events": []}',  # contradicts what is charged
        b'{"t": 0, "clients": ["0"], "events": []}',
        b'{"t": 0, "clients": 0, "events": []}',
        b'{"t": 0, "clients": [7], "events": [[{"sigma": 1.0}, 1]]}',
        *(b'{"round": 0}', b'{"round": 0, "rate": 2}', b'{"round": 0, "rate": "x"}', b'{"round": "0", "rate": 1}'),
    ],
}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines])
def test_any_other_bad_line_is_named(path: Path, name: str, line: bytes) -> None:
    full_run(path)
    lines = (path / name).read_bytes().split(b"\n")
    (path / name).write_bytes(b"\n".join([*lines[:3], line, *lines[3:]]))
    with pytest.raises(InputError, match=rf"{name}, line 4: .*"):
        RunRecord.open(path)


# Charges


def test_the_same_charge_is_written_once(path: Path) -> None:
    record = begin(path)
    record.charge(receipts(0))
    data = (path / "ledger.jsonl").read_bytes()
    record.charge(receipts(0) + receipts(0))
    record.close()
    RunRecord.open(path).charge(receipts(0))
    assert (path / "ledger.jsonl").read_bytes() == data
    again = RunRecord.open(path)
    assert [tuple(receipt) for receipt in again.ledger] == [tuple(receipt) for receipt in receipts(0)]
    assert again.ledger.events(0) == Counter({EVENT: 5})


def test_a_round_joined_by_coins_is_announced_once_and_read_back(path: Path) -> None:
    record = begin(path)
    record.charge(receipts(0), {0: 0.25})
    record.charge([], {1: 0.25})
    data = (path / "ledger.jsonl").read_bytes()
    record.close()
    again = RunRecord.open(path)
    assert (again.ledger.announced, charged(again)) == ({0: 0.25, 1: 0.25}, {(0, 0), (2, 0)})
    again.charge(receipts(0), {0: 0.25, 1: 0.25})
    with pytest.raises(InputError, match=r"announced at 0\.25"):
        again.charge([], {1: 0.5})
    again.close()
    assert (path / "ledger.jsonl").read_bytes() == data


def test_the_ledger_of_an_older_version_can_be_read(path: Path) -> None:
    begin(path)
    event = b'{"sampling": "poisson", "batch_size": 16, "num_examples": 1000, "sigma": 1.5}'
    with (path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"t": 0, "clients": [0], "events": [[' + event + b", 5]]}\n")
    assert RunRecord.open(path).ledger.events(0) == Counter({EVENT: 5})


def test_a_contradicting_charge_is_refused_before_it_is_written(path: Path) -> None:
    record = begin(path)
    record.charge(receipts(0))
    data = (path / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"client 0 .* round 0 .*other events"):
        record.charge([*receipts(1), Receipt(0, 0, Counter({EVENT: 6}))])
    assert (path / "ledger.jsonl").read_bytes() == data
    assert charged(RunRecord.open(path)) == {(0, 0), (2, 0)}


def disk_calls(action: Callable[[], object]) -> list[str]:
    """The names of the system's functions an action calls, in order."""
    calls: list[str] = []

    def watch(frame: object, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in DISK:
            calls.append(called.__name__)

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


DISK = {"mkdir", "open", "flock", "truncate", "seek", "write", "flush", "fsync", "replace", "unlink", "close"}


def test_charges_rows_and_states_are_forced_to_the_disk(path: Path) -> None:
    record = begin(path)
    calls = disk_calls(lambda: record.charge(receipts(0)))
    assert calls.index("write") < calls.index("flush") < calls.index("fsync")
    calls = disk_calls(lambda: record.append({"t": 0}))
    assert calls.index("write") < calls.index("flush")
    assert "fsync" not in calls
    weights = {"theta": torch.ones(2)}
    states = lambda: record.checkpoint(weights, 1), lambda: record.save_model(weights)
    for whole in (states[0], lambda: record.rewind(0), states[1]):
        calls = disk_calls(whole)
        if whole is states[0]:
            assert calls[:3] == ["open", "fsync", "close"], "the rows first"
            del calls[:3]
        assert calls.index("write") < calls.index("flush") < calls.index("fsync") < calls.index("replace")
        assert "fsync" in calls[calls.index("replace") :]


@pytest.mark.parametrize("num_bytes", [0, 10, 40, 140])
def test_a_full_disk_refuses_the_charge_and_tears_nothing(path: Path, num_bytes: int) -> None:
    record = begin(path)
    record.charge(receipts(0))
    record.append({"t": 0})
    before = contents(path)
    with full_disk(len(before["ledger.jsonl"]) + num_bytes), pytest.raises(InputError, match=r"ledger\.jsonl.*Make room"):
        record.charge(receipts(1, clients=tuple(range(9))))
    assert charged(RunRecord.open(path)) >= {(0, 0), (2, 0)}
    with full_disk(len(before["rows.jsonl"]) + 3), pytest.raises(InputError, match=r"rows\.jsonl.*Make room"):
        record.append({"t": 1})
    assert record.rows == RunRecord.open(path).rows == [{"t": 0}]
    with full_disk(50), pytest.raises(InputError, match=r"checkpoint\.safetensors.*Make room"):
        record.checkpoint({"theta": torch.ones(9)}, 1)
    record.charge(receipts(1, clients=(8,)))  # there is room again, and nothing of the torn lines is left
    assert (path / "ledger.jsonl").read_bytes().startswith(before["ledger.jsonl"] + b'{"t": 1, "clients": [0, 1, ')
    assert (path / "ledger.jsonl").read_bytes().count(b"\n") == before["ledger.jsonl"].count(b"\n") + 1
    record.charge(receipts(1, clients=tuple(range(9))))
    record.append({"t": 1})
    record.close()
    again = RunRecord.open(path)
    assert charged(again) == {(0, 0), (2, 0), *((client, 1) for client in range(9))}
    assert again.ledger.events(0) == Counter({EVENT: 10})
    assert again.rows == [{"t": 0}, {"t": 1}]
    assert set(contents(path)) == {*before}


def test_a_ledger_that_shrinks_under_a_run_is_noticed(path: Path) -> None:
    record = begin(path)
    record.charge(receipts(0))
    os.truncate(path / "ledger.jsonl", 20)
    with pytest.raises(InputError, match=r"ledger\.jsonl: became shorter"):
        record.charge(receipts(1))
    assert (path / "ledger.jsonl").stat().st_size == 20


# The state


def state() -> dict[str, Tensor]:
    shared = torch.arange(12.0).reshape(3, 4)
    return {
        "theta": shared[0],
        "turned": shared.T,
        "half": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "mask": torch.tensor([True, False]),
        "step": torch.tensor(3),
        "none": torch.zeros(0, 4),
        "bad": torch.tensor([math.nan, math.inf]),
        "gradient": torch.ones(2, requires_grad=True),
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype
        and torch.allclose(found[name], expected[name], rtol=0, atol=0, equal_nan=True)
        for name in expected
    )


def test_the_state_comes_back_bit_by_bit(path: Path) -> None:
    record = begin(path)
    assert record.restore() is None
    record.checkpoint({"theta": torch.zeros(2)}, 1)
    record.checkpoint(state(), 4)
    record.save_model(state())
    for found in (record, RunRecord.open(path)):
        restored = found.restore()
        assert restored is not None
        assert restored[0] == 4
        assert same(restored[1], state())
        assert same(found.load_model(), state())
        assert found.finished


def test_a_model_that_is_not_there_yet(path: Path) -> None:
    with pytest.raises(InputError, match=f"not there yet.*dpfed resume {path}"):
        begin(path).load_model()


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "model.safetensors"])
def test_a_state_cut_at_every_byte_is_refused(path: Path, name: str) -> None:
    record = full_run(path)
    record.save_model({"theta": torch.arange(3.0)})
    data = (path / name).read_bytes()
    for length in range(len(data)):
        (path / name).write_bytes(data[:length])
        with pytest.raises(InputError, match=name):
            record.restore() if name.startswith("checkpoint") else record.load_model()
    (path / name).write_bytes(data + b"\0")
    with pytest.raises(InputError, match=name):
        record.restore() if name.startswith("checkpoint") else record.load_model()


@pytest.mark.parametrize("mask", [0x01, 0x10, 0x20, 0x80, 0xFF])
def test_a_state_with_any_byte_flipped_is_refused_or_harmless(path: Path, mask: int) -> None:
    record = full_run(path)
    whole = record.restore()
    assert whole is not None
    data = (path / "checkpoint.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    harmless = 0
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= mask
        (path / "checkpoint.safetensors").write_bytes(flipped)
        found = None
        with suppress(InputError):
            found = record.restore()
        if found is not None:
            assert found[0] == whole[0]
            assert same(found[1], whole[1])
            assert place < header
            harmless += 1
    assert harmless <= 8  # the blanks that fill up the header


def test_foreign_states_are_refused(path: Path, tmp_path: Path) -> None:
    record = full_run(path)
    checkpoint = path / "checkpoint.safetensors"
    record.save_model({"theta": torch.ones(2)})
    other = RunRecord.create(tmp_path / "other", RECIPE | {"seed": 1}, {}, 1e-5)
    other.checkpoint({"theta": torch.ones(2)}, 1)

    shutil.copy(path / "model.safetensors", checkpoint)
    with pytest.raises(InputError, match=r"renamed.*Delete it"):
        record.restore()
    shutil.copy(tmp_path / "other" / "checkpoint.safetensors", checkpoint)
    with pytest.raises(InputError, match=r"another recipe.*Delete it"):
        record.restore()
    for metadata in (None, {"t": "1"}, {"checksum": "0"}):
        save_file({"theta": torch.ones(2)}, checkpoint, metadata)
        with pytest.raises(InputError, match=r"checksum.*Delete it"):
            record.restore()
    checkpoint.write_text("hello")
    with pytest.raises(InputError, match="Delete it"):
        record.restore()


def test_a_deleted_state_starts_again_and_keeps_every_charge(path: Path) -> None:
    full_run(path)
    (path / "checkpoint.safetensors").unlink()
    record = RunRecord.open(path)
    assert record.restore() is None
    record.rewind(0)
    assert record.rows == []
    assert charged(record) == {(client, t) for client in (0, 2) for t in range(3)}


def test_a_ledger_that_lost_charges_is_not_trained_on(path: Path) -> None:
    full_run(path)
    lines = (path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (path / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(InputError, match=r"ledger\.jsonl: holds 4 charges.*after 6"):
        RunRecord.open(path).restore()


# The lock


def test_only_one_writes_and_everyone_reads(path: Path) -> None:
    writer = begin(path)
    writer.append({"t": 0})
    reader = RunRecord.open(path)
    assert reader.rows == [{"t": 0}]
    weights = {"theta": torch.ones(2)}
    writes: list[Callable[[], None]] = [
        lambda: reader.charge(receipts(0)),
        lambda: reader.append({"t": 1}),
        lambda: reader.rewind(0),
        lambda: reader.checkpoint(weights, 1),
        lambda: reader.save_model(weights),
    ]
    before = contents(path)
    for write in writes:
        with pytest.raises(InputError, match="somebody else is writing"):
            write()
    assert contents(path) == before
    assert list(reader.ledger) == []
    writer.close()
    reader.append({"t": 1})
    with pytest.raises(InputError, match="somebody else is writing"):
        writer.append({"t": 1})
    reader.close()
    with pytest.raises(InputError, match="since it was read"):
        writer.append({"t": 1})
    assert RunRecord.open(path).rows == [{"t": 0}, {"t": 1}]


def test_a_record_that_is_forgotten_frees_the_lock(path: Path) -> None:
    record = begin(path)
    record.append({"t": 0})
    del record
    RunRecord.open(path).append({"t": 1})


def test_the_lock_of_a_killed_process_is_free(path: Path) -> None:
    begin(path).close()
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        RunRecord.open(path).append({"t": 0})
        record = RunRecord.open(path)
        record.append({"t": 1})
        os.write(told, b"!")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(InputError, match="somebody else is writing"):
        RunRecord.open(path).append({"t": 2})
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(told)
    RunRecord.open(path).append({"t": 2})


def test_a_read_only_run_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_run(path)
    monkeypatch.chdir(path)
    for file in path.iterdir():
        file.chmod(0o444)
    path.chmod(0o555)
    with ordinary_user():
        record = RunRecord.open(".")
        assert record.restore() is not None
        assert len(record.rows) == 3
        with pytest.raises(InputError, match=r"cannot be written \(Permission denied\)"):
            record.append({"t": 3})
    path.chmod(0o755)


# Killed at any moment


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def train(path: Path, release: Callable[[int], object], num_rounds: int = 3) -> None:
    """The round loop in small: begin or resume, and run to the end. A round is released after its charge."""
    with suppress(InputError):
        begin(path).close()
    record = RunRecord.open(path)
    first, tensors = record.restore() or (0, {"theta": torch.zeros(2)})
    theta = tensors["theta"]
    record.rewind(first)
    for t in range(first, num_rounds):
        record.charge(receipts(t))
        release(t)
        theta = theta / 3 + t
        record.append({"t": t, "accuracy": float(theta[0]), "epsilon": math.inf})
        if t != 1:  # not after every round
            record.checkpoint({"theta": theta}, t + 1)
    record.save_model({"theta": theta})
    record.close()


def train_and_die(path: Path, num_calls: int) -> tuple[list[int], bool]:
    """Train in a process that is killed before that many calls to the disk: the rounds it released; did it survive?"""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        left = num_calls

        def watch(frame: object, event: str, called: Any) -> None:
            nonlocal left
            if event == "c_call" and called.__name__ in DISK:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.setprofile(watch)
            train(path, lambda t: os.write(told, bytes([t])))
            status = 0
        finally:
            os._exit(status)
    os.close(told)
    released = list(os.read(ready, 100))
    os.close(ready)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return released, status == 0


@pytest.mark.parametrize("resuming", [False, True])
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_run_loses_no_charge_and_ends_the_same(tmp_path: Path, resuming: bool, stride: int) -> None:
    """Killed before every single call to the disk (stride 1), or before every seventh."""
    train(tmp_path / "whole", lambda t: None)
    expected = contents(tmp_path / "whole")
    for num_calls in range(0, 10_000, stride):
        path = tmp_path / str(num_calls)
        if resuming:  # from a run that was killed when round 1 was written but not saved
            train(path, lambda t: None, num_rounds=1)
            (path / "model.safetensors").unlink()
            record = RunRecord.open(path)
            record.charge(receipts(1))
            record.append({"t": 1, "accuracy": 0.25})
            record.close()
        released, survived = train_and_die(path, num_calls)
        if released:
            assert charged(RunRecord.open(path)) >= {(client, t) for client in (0, 2) for t in released}
        train(path, lambda t: None)
        assert contents(path) == expected
        shutil.rmtree(path)
        if survived:
            break
    assert survived
    assert num_calls > 60
