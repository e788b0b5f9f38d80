"""What clients keep between rounds, on disk: of 100,000 of them, only a cohort's is ever in memory.

    memory/00000017.safetensors    what was kept in round 17: a matrix for every vector, and in it a row for every client

A client's memory is its row in the newest file that names it. Files are written whole and never changed: a round's after the
round, and forced to the disk before the checkpoint that counts on it. So a SIGKILL can only fall

- into `keep`, or between it and the checkpoint: the round is done again, from the files of the rounds before the last
  checkpoint. Those of later rounds are not looked at; `keep` writes over them, to the same bits.
- after the checkpoint, before or into `tidy`: files that nobody needs any more are still there, and go the next time.

A file goes when a checkpoint has seen newer rows of all its clients. Where clients return seldom, many files would hold a few
rows that are still needed: then these move along into the newest file, one file a round, so that most of what is on the disk is
needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dpfed.disk import disk, read_tensors, replace_file, sync, tensors_as_bytes
from dpfed.errors import InputError

FOLDER = "memory"
Vectors = Mapping[str, Tensor]


class Memories:
    """The clients' memories before round ``t`` of a run, as named vectors.

    ``needed``: the rounds whose files the checkpoint counted on (`rounds`).
    """

    def __init__(self, run: Path, name: str, t: int = 0, needed: Iterable[int] = ()) -> None:
        self._folder, self._name = run / FOLDER, name
        self._remedy = f"Put it back as it was, or go on with `dpfed resume {run}` from another copy of the folder."
        self._place: dict[int, tuple[int, int]] = {}  # of every client that has one: the round and the row
        self._living, self._stored = Counter[int](), dict[int, int]()  # rows of a file: those needed, all
        self._loose: list[int] = []  # written, but not forced to the disk yet
        for path in sorted(self._folder.glob("*.safetensors")):
            if int(path.stem) >= t:
                break
            about, _ = read_tensors(path, self._remedy)
            if (about["run"], about["t"]) != (name, int(path.stem)):
                raise InputError(f"{path}: comes from another run, or was renamed. {self._remedy}")
            self._enter(about["t"], about["clients"])
        for missing in set(needed) - set(self._stored):
            raise InputError(f"{self._path(missing)}: what clients kept is missing. {self._remedy}")

    def rounds(self) -> list[int]:
        """Of the files that hold somebody's newest row."""
        return sorted(self._stored)

    def of(self, clients: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Those of the clients that have one, on the CPU."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        for client in clients:
            if client in self._place:
                t, row = self._place[client]
                wanted.setdefault(t, []).append((client, row))
        found: dict[int, dict[str, Tensor]] = {}
        for t, places in wanted.items():
            opened: Any = safe_open(self._path(t), "pt")
            with opened as file:
                matrices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                for client, row in places:
                    found[client] = {name: matrix[row : row + 1].squeeze(0) for name, matrix in matrices.items()}
        return found

    def keep(self, t: int, memories: Mapping[int, Vectors]) -> None:
        """What these clients have now, after round ``t``."""
        if not memories:
            return
        staying = list[int]()
        if sum(self._stored.values()) > 2 * len(self._place) + len(memories):
            sparse = min(self._stored, key=lambda file: self._living[file] / self._stored[file])
            staying = [client for client, (file, _) in self._place.items() if file == sparse and client not in memories]
        rest, everybody = self.of(staying), [*memories, *staying]
        matrices: Vectors = {}
        for name in next(iter(memories.values())):
            trained = torch.stack([vectors[name] for vectors in memories.values()]).cpu()  # in one piece, from where they train
            matrices[name] = torch.cat([trained, *(rest[client][name].unsqueeze(0) for client in staying)])
        with disk(self._path(t), self._remedy):
            self._folder.mkdir(exist_ok=True)
            about = {"run": self._name, "t": t, "clients": everybody}
            replace_file(self._path(t), tensors_as_bytes(matrices, about), durable=False)
        self._enter(t, everybody)
        self._loose.append(t)

    def settle(self) -> None:
        """Force to the disk what a checkpoint is going to count on."""
        with disk(self._folder, self._remedy):
            for t in self._loose:
                sync(self._path(t))
            if self._loose:
                sync(self._folder)
        self._loose.clear()

    def tidy(self) -> None:
        """After a checkpoint: remove the files of which it needs nothing."""
        for path in {*self._folder.glob("*")} - {self._path(t) for t in self._stored}:
            path.unlink()

    def _enter(self, t: int, clients: list[int]) -> None:
        for row, client in enumerate(clients):
            if client in self._place:
                before, _ = self._place[client]
                self._living[before] -= 1
                if not self._living[before]:
                    del self._stored[before]
            self._place[client] = (t, row)
        self._living[t], self._stored[t] = len(clients), len(clients)

    def _path(self, t: int) -> Path:
        return self._folder / f"{t:08}.safetensors"
