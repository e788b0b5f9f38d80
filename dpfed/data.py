"""Who holds which records, and who takes part when: federations, cohorts and batches, all drawn by key.

Every random choice is keyed by what is drawn (seed, purpose, round, client, step), never by the order of drawing. So engines
agree, a client's batches do not depend on who else trains, and resuming equals not stopping.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from dpfed.errors import InputError
from dpfed.flat import Records

Sampling = Literal["poisson", "fixed"]
Source = Any  # (x, y), a dict of columns, or a map-style data set of (x, y) pairs


def key(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit key that says what is drawn.

    >>> key(0, "batch", 3, 1) == key(0, "batch", 3, 1) != key(0, "batch", 1, 3)
    True
    """
    text = f"{seed}/{purpose}/{'/'.join(map(str, numbers))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(key(seed, purpose, *numbers))


def batch(
    seed: int, t: int, client: int, k: int, *, num_examples: int, batch_size: int, sampling: Sampling, draw: int = 0
) -> Tensor:
    """Which of its records a client uses in local step ``k`` of round ``t`` (``draw`` > 0: a further batch of that step).

    ``poisson``: every record by its own coin of rate min(1, batch_size / num_examples), so the batch may be empty.
    ``fixed``: exactly min(batch_size, num_examples) records, without replacement.
    """
    coins = generator(seed, "batch", t, client, k, draw)
    if batch_size >= num_examples:
        return torch.arange(num_examples)
    if sampling == "fixed":
        return torch.randperm(num_examples, generator=coins)[:batch_size].sort().values
    chosen = torch.rand(num_examples, generator=coins, dtype=torch.float64) < batch_size / num_examples
    return chosen.nonzero().squeeze(1)


class Footprint(NamedTuple):
    """How many records of its client a protected unit may touch: it owns some, and others read it (and change without it)."""

    owned: int = 1
    readers: int = 0


RECORD = Footprint()


@dataclass(frozen=True, eq=False)
class Federation:
    """The records of all clients as one pool of columns, and for every client the rows that are its own.

    ``footprint``: of what the guarantee protects, by default a record; ``Footprint(owned=5)`` is people with up to 5 records.

    >>> x, y = torch.zeros(6, 2), torch.tensor([0, 0, 1, 1, 2, 2])
    >>> iid((x, y), num_clients=3)
    Federation(3 clients, 6 records, 2 to 2 each)
    """

    records: Records
    clients: tuple[Tensor, ...]
    test: Records | None = None
    footprint: Footprint = RECORD

    def __post_init__(self) -> None:
        if self.footprint.owned < 0 or self.footprint.readers < 0 or sum(self.footprint) < 1:
            raise InputError(f"footprint: needs counts, 0 or above, and one of them above 0; got {self.footprint}.")
        num_records = _check_columns("records", self.records)
        if self.test is not None:
            _check_columns("test", self.test)
            if set(self.test) != set(self.records):
                raise InputError(f"test: has the columns {sorted(self.test)}, the records {sorted(self.records)}.")
        if not self.clients:
            raise InputError("clients: the federation has no clients. Give at least one.")
        owner = torch.full((num_records,), -1)
        for i, rows in enumerate(self.clients):
            if rows.numel() == 0:
                raise InputError(f"clients[{i}]: has no records. Leave it out, or give it some.")
            if int(rows.min()) < 0 or int(rows.max()) >= num_records:
                raise InputError(f"clients[{i}]: names row {int(rows.max())}, but there are {num_records} records.")
            shared = rows[owner[rows] >= 0]
            if shared.numel() or rows.unique().numel() != rows.numel():
                row = int(shared[0]) if shared.numel() else int(rows.sort().values.diff().eq(0).nonzero()[0])
                also = f"client {int(owner[row])}" if shared.numel() else "the same client"
                raise InputError(
                    f"clients[{i}]: record {row} also belongs to {also}. A record that is used twice loses its guarantee: "
                    "give every record to exactly one client, once."
                )
            owner[rows] = i

    def __repr__(self) -> str:
        low, high = min(self.sizes), max(self.sizes)
        return f"Federation({len(self.clients)} clients, {sum(self.sizes)} records, {low} to {high} each)"

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self.clients]

    def to(self, device: torch.device | str) -> Federation:
        """The same federation with its records on a device; who owns what stays on the CPU."""
        moved = {name: column.to(device) for name, column in self.records.items()}
        copy = object.__new__(Federation)  # nothing changed that would have to be checked again
        for name, value in {**vars(self), "records": moved}.items():
            object.__setattr__(copy, name, value)
        return copy

    def cohort(self, seed: int, t: int, size: int, sampling: Sampling = "fixed", *, without: Collection[int] = ()) -> list[int]:
        """The clients of round ``t``, sorted, out of those that are not ``without``.

        ``fixed``: uniform without replacement; ``poisson``: each by its own coin of rate size / clients, so perhaps nobody.
        """
        coins, num_clients = generator(seed, "cohort", t), len(self.clients)
        if sampling == "poisson":
            chosen = torch.rand(num_clients, generator=coins, dtype=torch.float64) < size / num_clients
            return [i for i in chosen.nonzero().squeeze(1).tolist() if i not in without]
        order: list[int] = torch.randperm(num_clients, generator=coins).tolist()
        return sorted([i for i in order if i not in without][:size])


def from_clients(clients: Sequence[Source], test: Source | None = None, *, equal_records: bool = False) -> Federation:
    """A federation from one data set per client.

    A record whose content stands at two clients is refused, because its guarantee would be spent twice;
    ``equal_records=True`` says that equal contents are different records (two people who wrote the same sentence).
    """
    columns = [as_records(f"clients[{i}]", source) for i, source in enumerate(clients)]
    if not columns:
        raise InputError("clients: the federation has no clients. Give at least one.")
    for i, records in enumerate(columns):
        unlike = [n for n in columns[0] if n not in records or records[n].shape[1:] != columns[0][n].shape[1:]]
        if unlike or set(records) != set(columns[0]):
            raise InputError(f"clients[{i}]: its columns differ from those of clients[0]. Bring all to the same shapes.")
    if not equal_records:
        _refuse_shared(columns)
    ends = np.cumsum([len(records["y"]) for records in columns])
    pool = {name: torch.cat([records[name] for records in columns]) for name in columns[0]}
    rows = tuple(torch.arange(end - len(r["y"]), end) for end, r in zip(ends.tolist(), columns, strict=True))
    return Federation(pool, rows, _maybe_test(test))


def iid(source: Source, num_clients: int, *, seed: int = 0, test: Source | None = None) -> Federation:
    """Records dealt out at random, sizes as equal as possible."""
    records = as_records("records", source)
    order = torch.randperm(len(records["y"]), generator=generator(seed, "iid"))
    _check_clients(num_clients, len(order))
    return Federation(records, tuple(part.sort().values for part in order.tensor_split(num_clients)), _maybe_test(test))


def dirichlet(source: Source, num_clients: int, *, alpha: float, seed: int = 0, test: Source | None = None) -> Federation:
    """Clients of equal size whose label proportions are drawn from Dirichlet(alpha); the smaller alpha, the more unlike.

    Every record goes to one client only: when a label has run out, a client takes its other labels instead (in the
    proportions it wanted), so the last clients of a very small alpha are more mixed than their draw.
    """
    records = as_records("records", source)
    labels = records["y"].numpy()
    _check_clients(num_clients, len(labels))
    if not alpha > 0:
        raise InputError(f"alpha: must be above 0 (0.1 is very uneven, 100 nearly even), got {alpha}.")
    random = np.random.Generator(np.random.Philox(key=key(seed, "dirichlet")))
    classes, label_of = np.unique(labels, return_inverse=True)
    pools = [random.permutation(np.flatnonzero(label_of == c)) for c in range(len(classes))]
    left = np.array([len(pool) for pool in pools])
    sizes = [len(part) for part in np.array_split(np.arange(len(labels)), num_clients)]
    rows: list[Tensor] = []
    for size in sizes:
        wanted = random.dirichlet(np.full(len(classes), alpha)) if alpha < 1e6 else np.full(len(classes), 1.0)
        take = np.zeros(len(classes), dtype=int)
        while (missing := size - take.sum()) > 0:
            room = left - take
            weights = np.where(room > 0, wanted, 0.0)
            weights = weights if weights.sum() > 1e-12 else room.astype(float)
            take += np.minimum(random.multinomial(missing, weights / weights.sum()), room)
        mine = [pool[n - k : n] for pool, n, k in zip(pools, left, take, strict=True)]
        left = left - take
        rows.append(torch.from_numpy(np.sort(np.concatenate(mine))))
    return Federation(records, tuple(rows), _maybe_test(test))


def shards(source: Source, num_clients: int, *, per_client: int = 2, seed: int = 0, test: Source | None = None) -> Federation:
    """Records sorted by label and cut into shards; every client gets ``per_client`` of them."""
    records = as_records("records", source)
    _check_clients(num_clients * per_client, len(records["y"]))
    pieces = records["y"].sort(stable=True).indices.tensor_split(num_clients * per_client)
    order = torch.randperm(len(pieces), generator=generator(seed, "shards")).view(num_clients, per_client)
    rows = tuple(torch.cat([pieces[j] for j in mine]).sort().values for mine in order.tolist())
    return Federation(records, rows, _maybe_test(test))


def by_user(source: Source, users: Sequence[Any] | Tensor, *, test: Source | None = None) -> Federation:
    """One client per distinct value of ``users``, which names the owner of every record."""
    records = as_records("records", source)
    names = np.asarray(users)
    if names.shape != (len(records["y"]),):
        raise InputError(f"users: must name one owner per record ({len(records['y'])}), got shape {names.shape}.")
    _, owner = np.unique(names, return_inverse=True)
    rows = tuple(torch.from_numpy(np.flatnonzero(owner == i)) for i in range(int(owner.max()) + 1))
    return Federation(records, rows, _maybe_test(test))


def as_records(field: str, source: Source) -> Records:
    """Columns from what people have: a pair (x, y), a dict of columns with ``y``, or a data set of (x, y) pairs."""
    if isinstance(source, dict):
        columns = cast(dict[str, Any], source)
    elif isinstance(source, (tuple, list)) and len(cast(Sequence[Any], source)) == 2 and hasattr(source[0], "shape"):
        columns = {"x": source[0], "y": source[1]}
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        pairs = [source[i] for i in range(len(source))]
        if not pairs:
            raise InputError(f"{field}: the data set is empty. Leave it out, or give it records.")
        columns = {
            "x": torch.stack([torch.as_tensor(x) for x, _ in pairs]),
            "y": torch.stack([torch.as_tensor(y) for _, y in pairs]),
        }
    else:
        raise InputError(f"{field}: expected (x, y), a dict of columns or a data set of pairs, got {type(source).__name__}.")
    if "y" not in columns:
        raise InputError(f"{field}: has no column 'y' (the target); it has {sorted(columns)}.")
    return {str(name): torch.as_tensor(column) for name, column in columns.items()}


def _maybe_test(test: Source | None) -> Records | None:
    return None if test is None else as_records("test", test)


def _check_clients(wanted: int, num_records: int) -> None:
    if not 1 <= wanted <= num_records:
        raise InputError(f"num_clients: cannot deal {num_records} records to {wanted} clients; choose 1 to {num_records}.")


def _check_columns(field: str, records: Records) -> int:
    lengths = {name: len(column) if column.dim() else -1 for name, column in records.items()}
    if len(set(lengths.values())) != 1 or min(lengths.values()) < 1:
        raise InputError(f"{field}: all columns need one entry per record and at least one record, got lengths {lengths}.")
    for name, column in records.items():
        if column.is_floating_point() and not bool(column.isfinite().all()):
            row = int((~column.isfinite()).flatten(1 if column.dim() > 1 else 0).reshape(len(column), -1).any(1).nonzero()[0])
            raise InputError(f"{field}: column '{name}' holds NaN or Inf, first in record {row}. Clean or drop that record.")
    return lengths["y"]


def _refuse_shared(columns: Iterable[Records]) -> None:
    owner: dict[bytes, int] = {}
    for i, records in enumerate(columns):
        for row in range(len(records["y"])):
            content = hashlib.blake2b(digest_size=16)
            for name in sorted(records):
                content.update(records[name][row].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            first = owner.setdefault(content.digest(), i)
            if first != i:
                raise InputError(
                    f"clients[{i}]: its record {row} equals a record of clients[{first}]. If it is the same record, give it "
                    "to one client only (its guarantee would be spent twice); if not, say equal_records=True."
                )
