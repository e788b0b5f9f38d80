"""What clients keep on disk: the newest row of each, whatever is killed in between, and not much else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpfed.errors import InputError
from dpfed.memories import Memories


def memory(t: int, client: int) -> dict[str, Tensor]:
    here = torch.Generator().manual_seed(1000 * t + client)
    return {
        "c": torch.randn(5, generator=here),
        "m.value": torch.randn(3, generator=here).bfloat16(),
        "places": torch.randint(9, (2,), generator=here),
        "nothing": torch.zeros(0),
    }


def same(found: dict[int, dict[str, Tensor]], expected: dict[int, int]) -> bool:
    """Of every client what it kept in the given round, to the bit."""
    wanted = {client: memory(t, client) for client, t in expected.items()}
    return found.keys() == wanted.keys() and all(
        found[i].keys() == wanted[i].keys()
        and all(found[i][n].equal(x) and found[i][n].dtype == x.dtype for n, x in wanted[i].items())
        for i in wanted
    )


@pytest.mark.parametrize(("num_clients", "cohort"), [(4, 4), (12, 3), (200, 5)])
def test_the_newest_rows_survive_kills_at_any_point(tmp_path: Path, num_clients: int, cohort: int) -> None:
    draw, everybody = random.Random(1), range(num_clients)
    now, held = Memories(tmp_path, "run"), dict[int, int]()
    at_checkpoint, t_checkpoint, needed = dict[int, int](), 0, list[int]()
    t = 0
    while t < 150:
        chosen = sorted(random.Random(t).sample(everybody, cohort))
        assert same(now.of(chosen), {i: held[i] for i in chosen if i in held})
        now.keep(t, {i: memory(t, i) for i in chosen})
        held |= dict.fromkeys(chosen, t)
        t += 1
        if draw.random() < 0.3:
            now.settle()
            at_checkpoint, t_checkpoint, needed = dict(held), t, now.rounds()
            if draw.random() < 0.8:
                now.tidy()
        if draw.random() < 0.15:  # killed, perhaps in the middle of a file, and resumed
            (tmp_path / "memory" / f"{t:08}.safetensors.part").write_bytes(b"half")
            now, held, t = Memories(tmp_path, "run", t_checkpoint, needed), dict(at_checkpoint), t_checkpoint
            assert same(now.of(everybody), held)
    now.settle()
    now.tidy()
    assert same(Memories(tmp_path, "run", t, now.rounds()).of(everybody), held)
    assert {int(file.stem) for file in tmp_path.glob("memory/*")} == set(now.rounds())
    assert sum(now._stored.values()) <= 2 * num_clients + 2 * cohort, "of old rows no more than of needed ones, nearly"


def test_what_is_damaged_missing_or_of_another_run_is_refused(tmp_path: Path) -> None:
    now = Memories(tmp_path, "run")
    for t in range(2):
        now.keep(t, {client: memory(t, client) for client in (2 * t, 2 * t + 1)})
    file, needed = tmp_path / "memory" / "00000000.safetensors", now.rounds()
    data = file.read_bytes()
    assert needed == [0, 1]
    with pytest.raises(InputError, match=r"00000000\.safetensors: comes from another run"):
        Memories(tmp_path, "other", 2)
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(InputError, match=r"00000000\.safetensors: the checksum does not match"):
        Memories(tmp_path, "run", 2)
    file.unlink()
    with pytest.raises(InputError, match=r"00000000\.safetensors: what clients kept is missing.*resume"):
        Memories(tmp_path, "run", 2, needed)


def test_nothing_is_written_where_nothing_is_kept(tmp_path: Path) -> None:
    now = Memories(tmp_path, "run")
    now.keep(0, {})
    now.settle()
    now.tidy()
    assert (list(tmp_path.iterdir()), now.rounds(), now.of([0, 1])) == ([], [], {})
