"""Who holds which records, and who takes part when: federations, cohorts and batches, all drawn by key.

Every random choice is keyed by what is drawn (seed, purpose, round, client, step), never by the order of drawing. So engines
agree, a client's batches do not depend on who else trains, and resuming equals not stopping. A deployment has no seed: there
batches come from `dpfed.secure`, and only the cohorts, which are public, from a key.
"""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dpfed import dealing
from dpfed.columns import Source, as_records, check_columns
from dpfed.errors import InputError
from dpfed.flat import Records, in_dtype
from dpfed.secure import secure_uniform

Sampling = Literal["poisson", "fixed"]
Drawing = Literal["poisson", "fixed", "shuffled"]  # of batches; what has a price is drawn as one of the first two
Sizes = Literal["equal", "natural"]


def key(seed: int | None, purpose: str, *numbers: int) -> int:
    """A 63-bit key that says what is drawn. In a deployment, which has no seed, a secret one that never comes again.

    >>> key(0, "batch", 3, 1) == key(0, "batch", 3, 1) != key(0, "batch", 1, 3)
    True
    """
    if seed is None:
        return secrets.randbits(63)
    text = f"{seed}/{purpose}/{'/'.join(map(str, numbers))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(seed: int | None, purpose: str, *numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Of what is keyed. Without a seed there is none: what has to be secret comes from `dpfed.secure`."""
    if seed is None:
        raise InputError(f"seed: a deployment has none, so nobody can draw its {purpose}. Use dpfed.secure, or give a seed.")
    return keyed(torch.Generator(device), key(seed, purpose, *numbers))


TWISTER = torch.Generator().manual_seed(0).get_state().numpy().view(np.int64).copy()
"""A Mersenne twister that is about to draw its first number: three numbers, the 624 words of its state, and the rest."""


def keyed(random: torch.Generator, number: int) -> torch.Generator:
    """The generator, made to draw what this key says.

    On a CPU torch takes only 32 bits of a seed: among 50,000 draws two would likely be the same noise. So there the whole state
    of the Mersenne twister is filled from the key.
    """
    if random.device.type != "cpu":
        return random.manual_seed(number)
    state = TWISTER.copy()
    state[3 : 3 + 624] = np.frombuffer(hashlib.shake_128(number.to_bytes(8, "little")).digest(4 * 624), np.uint32)
    return random.set_state(torch.from_numpy(state.view(np.uint8)))


def batches(
    seed: int | None,
    t: int,
    clients: Sequence[int],
    k: int,
    num_steps: int,
    sizes: Sequence[int],
    batch_size: int,
    sampling: Drawing,
    draw: int = 0,
) -> tuple[Tensor, Tensor]:
    """Which of its records each client uses in local step ``k`` of ``num_steps`` in round ``t`` (``draw`` > 0: a further batch
    of that step): those of the first client in rising order, then those of the second; and how many each uses.

    ``poisson``: every record by its own coin of rate min(1, batch_size / size), so a batch may be empty.
    ``fixed``: exactly min(batch_size, size) records, without replacement.
    ``shuffled``: as many, in passes: step t * num_steps + k takes the next of a random order, and when too few are left for a
    batch, a new order begins. Which pass it is follows from the step alone: who misses a round misses its part of the pass.
    Without a seed, in a deployment, nobody else can know which: sampling amplifies only while it is secret.
    """
    if sampling == "shuffled" and seed is None:
        raise InputError(
            "mechanism.sampling: 'shuffled' needs a seed, and a deployment has none: an order that is drawn anew in every step "
            "is no pass over the records. Take 'fixed'."
        )
    random, lengths = torch.Generator(), torch.tensor(sizes)

    def coins_of(client: int) -> torch.Generator:
        return keyed(random, key(seed, "batch", t, client, k, draw))

    def order(client: int, size: int) -> Tensor:
        if size <= batch_size:
            return torch.arange(size)
        if sampling == "shuffled":
            number, place = divmod(t * num_steps + k, size // batch_size)
            order = torch.randperm(size, generator=keyed(random, key(seed, "pass", client, number, draw)))
            return order[place * batch_size :][:batch_size].sort().values
        order = secure_uniform(size).argsort() if seed is None else torch.randperm(size, generator=coins_of(client))
        return order[:batch_size].sort().values

    def coins(client: int, size: int) -> Tensor:
        if size <= batch_size:
            return torch.zeros(size, dtype=torch.float64)
        return secure_uniform(size) if seed is None else torch.rand(size, generator=coins_of(client), dtype=torch.float64)

    if sampling != "poisson":
        return torch.cat([*map(order, clients, sizes)]), lengths.clamp(max=batch_size)
    thrown = torch.cat([*map(coins, clients, sizes)])
    chosen = (thrown < (batch_size / lengths.double()).repeat_interleave(lengths)).nonzero().squeeze(1)
    ends = lengths.cumsum(0)
    owner = torch.searchsorted(ends, chosen, right=True)
    return chosen - (ends - lengths)[owner], torch.bincount(owner, minlength=len(sizes))


def batch(
    seed: int | None,
    t: int,
    client: int,
    k: int,
    *,
    num_examples: int,
    batch_size: int,
    sampling: Drawing,
    num_steps: int = 1,
    draw: int = 0,
) -> Tensor:
    """The batch of one client: see `batches`."""
    return batches(seed, t, [client], k, num_steps, [num_examples], batch_size, sampling, draw)[0]


class Shares(Sequence[Tensor]):
    """For every client the rows that are its own: as one vector, and the place where each client's part begins.

    >>> shares = Shares.of_owners(np.array([1, 0, 1, -1]), num_clients=2)
    >>> len(shares), shares[1], shares.sizes
    (2, tensor([0, 2]), [1, 2])
    """

    def __init__(self, rows: Tensor, sizes: Sequence[int]) -> None:
        self.rows, self.sizes = rows, list(sizes)
        self.starts = list(accumulate(self.sizes, initial=0))

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> Shares:
        """What was given client by client; what is one already stays as it is."""
        return parts if isinstance(parts, Shares) else cls(torch.cat([*parts]), [len(rows) for rows in parts])

    @classmethod
    def of_owners(cls, owner: np.ndarray, num_clients: int) -> Shares:
        """From the owner of every row, -1 where nobody is; each client's rows rise."""
        rows = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
        return cls(torch.from_numpy(rows), np.bincount(owner[rows], minlength=num_clients).tolist())

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: Any) -> Any:
        place = range(len(self))[i]
        return [self[j] for j in place] if isinstance(place, range) else self.rows[self.starts[place] : self.starts[place + 1]]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows.split(self.sizes))

    @cached_property
    def largest(self) -> int:
        """What the client with the most has."""
        return max(self.sizes)

    def owners(self, num_rows: int) -> Tensor:
        """The owner of every row; -1 where nobody is."""
        return torch.full((num_rows,), -1).index_put_((self.rows,), self.of_each())

    def of_each(self) -> Tensor:
        """The client of each entry of ``rows``."""
        return torch.arange(len(self)).repeat_interleave(torch.tensor(self.sizes))


class Footprint(NamedTuple):
    """How many records of its client a protected unit may touch: it owns some, and others read it (and change without it)."""

    owned: int = 1
    readers: int = 0


RECORD = Footprint()


@dataclass(frozen=True, eq=False)
class Federation:
    """The records of all clients as one pool of columns, and for every client the rows that are its own.

    ``test_clients``: for every client the rows of the test records by which it is judged; `deal_test` makes them.
    ``footprint``: of what the guarantee protects, by default a record; ``Footprint(owned=5)`` is people with up to 5 records.

    >>> x, y = torch.zeros(6, 2), torch.tensor([0, 0, 1, 1, 2, 2])
    >>> iid((x, y), num_clients=3)
    Federation(3 clients, 6 records, 2 to 2 each)
    """

    records: Records
    clients: Sequence[Tensor]
    test: Records | None = None
    test_clients: Sequence[Tensor] | None = None
    footprint: Footprint = RECORD

    def __post_init__(self) -> None:
        if self.footprint.owned < 0 or self.footprint.readers < 0 or sum(self.footprint) < 1:
            raise InputError(f"footprint: needs counts, 0 or above, and one of them above 0; got {self.footprint}.")
        num_records = check_columns("records", self.records)
        if self.test is not None:
            check_columns("test", self.test)
            if set(self.test) != set(self.records):
                raise InputError(f"test: has the columns {sorted(self.test)}, the records {sorted(self.records)}.")
        if not self.clients:
            raise InputError("clients: the federation has no clients. Give at least one.")
        object.__setattr__(self, "clients", Shares.of(self.clients))
        self._check_owners(num_records)
        if self.test_clients is not None:
            object.__setattr__(self, "test_clients", Shares.of(self.test_clients))
            self._check_shares(self.test_clients)

    def _check_owners(self, num_records: int) -> None:
        if 0 in self.sizes:
            raise InputError(f"clients[{self.sizes.index(0)}]: has no records. Leave it out, or give it some.")
        rows, owner = self.shares.rows, self.shares.of_each()
        outside = ((rows < 0) | (rows >= num_records)).nonzero()
        if len(outside):
            i, row = (int(column[outside[0]]) for column in (owner, rows))
            raise InputError(f"clients[{i}]: names row {row}, but there are {num_records} records.")
        ordered, places = rows.sort(stable=True)
        again = ordered.diff().eq(0).nonzero().squeeze(1)
        if len(again):
            first = again[places[again + 1].argmin()]  # of those named again, the one that comes first
            i, other, row = (int(x) for x in (owner[places[first + 1]], owner[places[first]], ordered[first]))
            also = f"client {other}" if other != i else "the same client"
            raise InputError(
                f"clients[{i}]: record {row} also belongs to {also}. A record that is used twice loses its guarantee: "
                "give every record to exactly one client, once."
            )

    def _check_shares(self, shares: Sequence[Tensor]) -> None:
        num_test, rows = 0 if self.test is None else len(self.test["y"]), Shares.of(shares).rows
        inside = bool(((rows >= 0) & (rows < num_test)).all())
        if len(shares) != len(self.clients) or not inside or not len(rows):
            raise InputError(
                f"test_clients: must give each of the {len(self.clients)} clients rows of the {num_test} test records. "
                "federation.deal_test() does."
            )

    def __repr__(self) -> str:
        low, high = min(self.sizes), max(self.sizes)
        return f"Federation({len(self.clients)} clients, {sum(self.sizes)} records, {low} to {high} each)"

    @property
    def shares(self) -> Shares:
        """``clients`` as what it is."""
        return Shares.of(self.clients)

    @property
    def sizes(self) -> list[int]:
        """How many records each client holds."""
        return self.shares.sizes

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Federation:
        """The same federation with its records on a device, in ``dtype`` if one is given; who owns what stays on the CPU."""
        moved = {name: column.to(device) for name, column in self.records.items()}
        moved = {name: column if name == "y" else in_dtype(column, dtype) for name, column in moved.items()}
        copy = object.__new__(Federation)  # nothing changed that would have to be checked again
        for name, value in (vars(self) | {"records": moved}).items():
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
        order: list[int] = torch.randperm(num_clients, generator=coins)[: size + len(without)].tolist()
        return sorted([i for i in order if i not in without][:size])

    def deal_test(self, seed: int = 0) -> Federation:
        """The same federation with a part of the test records for every client: each label in the proportions in which the
        clients hold it. No test record belongs to two; a client that holds little may get none."""
        if self.test is None or self._labels() is None or self.test["y"].dim() != 1:
            raise InputError("test: dealing it needs test records with one whole number as label. Give the federation some.")
        labels, test_labels = self.records["y"].cpu().numpy(), self.test["y"].cpu().numpy()
        owner, num_clients = self.shares.owners(len(labels)).numpy(), len(self.clients)
        dealt = dealing.matching_labels(labels, owner, num_clients, test_labels, _random(seed, "test"))
        return replace(self, test_clients=Shares.of_owners(dealt, num_clients))

    def label_counts(self) -> Tensor | None:
        """``[clients, labels]``: how many records of which label (of those that occur) each holds; None without labels."""
        labels = self._labels()
        if labels is None:
            return None
        num_labels, num_clients = int(labels.max()) + 1, len(self.clients)
        pairs = self.shares.of_each() * num_labels + labels[self.shares.rows]
        return torch.bincount(pairs, minlength=num_clients * num_labels).view(num_clients, num_labels)

    def _labels(self) -> Tensor | None:
        """Every record's label as its place among the labels that occur."""
        y = self.records["y"].cpu()
        return None if y.dim() != 1 or y.is_floating_point() else y.unique(return_inverse=True)[1]

    def table(self, at_most: int = 20) -> str:
        """Who holds what, as text: a line for each of the first clients, and one for all."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for heading in ("client", "records", "test", "labels"):
            table.add_column(heading, justify="right")
        table.add_column("most")
        found = self.label_counts()
        counts = torch.zeros(len(self.clients), 0, dtype=torch.long) if found is None else found
        names = [] if found is None else self.records["y"].unique().tolist()
        tests = ["-"] * len(self.clients) if self.test_clients is None else [str(len(rows)) for rows in self.test_clients]
        for i, size in enumerate(self.sizes[:at_most]):
            top = counts[i].sort(descending=True, stable=True).indices[:4].tolist()
            most = "  ".join(f"{names[c]}: {counts[i, c] / size:.0%}" for c in top if counts[i, c])
            table.add_row(str(i), f"{size:,}", tests[i], str(int((counts[i] > 0).sum())) if names else "-", most)
        if len(self.clients) > at_most:
            table.add_row("...", "", "", "", f"and {len(self.clients) - at_most} more")
        page = Console(file=io.StringIO(), width=100, color_system=None, legacy_windows=False)
        page.print(table)
        lines = [line.rstrip() for line in cast(io.StringIO, page.file).getvalue().splitlines() if line.strip()]
        sizes = sorted(self.sizes)
        lines.append(
            f"{len(sizes)} clients, {sum(sizes):,} records: {sizes[0]:,} to {sizes[-1]:,} each, median {median(sizes):,.0f}"
            + (f"; {len(names)} labels" if names else "")
            + (f"; {len(self.test['y']):,} test records" if self.test is not None else "")
        )
        return "\n".join(lines)


def from_clients(
    clients: Sequence[Source],
    test: Source | None = None,
    *,
    equal_records: bool = False,
    client_tests: Sequence[Source] | None = None,
) -> Federation:
    """A federation from one data set per client; ``client_tests``: a test of its own for every client, instead of ``test``.

    A record whose content stands at two clients is refused, because its guarantee would be spent twice;
    ``equal_records=True`` says that equal contents are different records (two people who wrote the same sentence).
    """
    columns = _alike("clients", clients)
    if not equal_records:
        _refuse_shared(columns)
    pool, rows = _pooled(columns)
    if client_tests is None:
        return Federation(pool, rows, _maybe_test(test))
    if test is not None or len(client_tests) != len(clients):
        raise InputError(f"client_tests: give one for each of the {len(clients)} clients and no test beside them.")
    return Federation(pool, rows, *_pooled(_alike("client_tests", client_tests)))


def iid(source: Source, num_clients: int, *, seed: int = 0, test: Source | None = None) -> Federation:
    """Records dealt out at random, sizes as equal as possible."""
    records = as_records("records", source)
    order = torch.randperm(len(records["y"]), generator=generator(seed, "iid")).numpy()
    _check_clients(num_clients, len(order))
    owner = dealing.in_turn(order, dealing.even_sizes(len(order), num_clients))
    return Federation(records, Shares.of_owners(owner, num_clients), _maybe_test(test))


def dirichlet(
    source: Source,
    num_clients: int,
    *,
    alpha: float,
    sizes: Sizes = "equal",
    smallest: int = 1,
    seed: int = 0,
    test: Source | None = None,
) -> Federation:
    """Clients whose labels are drawn from Dirichlet(alpha): 0.1 is very uneven, 100 nearly even, inf even.

    ``sizes="equal"``: the label proportions of every client are a draw, its size is not. Every record goes to one client only:
    when a label has run out, a client takes its other labels instead (in the proportions it wanted), so the last clients of a
    very small alpha are more mixed than their draw.
    ``sizes="natural"``: the shares of every label are a draw over the clients, so sizes are as uneven as labels; clients below
    ``smallest`` are then given records of the largest.
    """
    records = as_records("records", source)
    labels = records["y"].cpu().numpy()
    if labels.ndim != 1:
        raise InputError(f"y: dealing by label needs one label per record, got shape {labels.shape}. Use iid or by_user.")
    _check_clients(num_clients * smallest if sizes == "natural" else num_clients, len(labels), num_clients)
    if not alpha > 0:
        raise InputError(f"alpha: must be above 0 (0.1 is very uneven, 100 nearly even), got {alpha}.")
    if sizes not in ("equal", "natural"):
        raise InputError(f"sizes: must be 'equal' or 'natural', got {sizes!r}.")
    if sizes == "equal":
        owner = dealing.equal_dirichlet(labels, num_clients, alpha, _random(seed, "dirichlet"))
    else:
        owner = dealing.natural_dirichlet(labels, num_clients, alpha, smallest, _random(seed, "natural"))
    return Federation(records, Shares.of_owners(owner, num_clients), _maybe_test(test))


def quantity_skew(
    source: Source,
    num_clients: int,
    *,
    alpha: float | None = None,
    power: float | None = None,
    smallest: int = 1,
    seed: int = 0,
    test: Source | None = None,
) -> Federation:
    """Records dealt out at random, in uneven amounts: ``smallest`` for everyone, and the rest in proportion to a draw from
    Dirichlet(alpha), or to ``rank ** -power`` (Zipf's law at power 1; client 0 is the largest)."""
    records = as_records("records", source)
    num_records = len(records["y"])
    _check_clients(num_clients * smallest, num_records, num_clients)
    law = alpha if power is None else power
    if law is None or None not in (alpha, power) or not law > 0:
        raise InputError(f"alpha, power: give one of the two, above 0; got alpha={alpha}, power={power}.")
    random = _random(seed, "quantity")
    weights = random.dirichlet(np.full(num_clients, law)) if power is None else np.arange(1.0, num_clients + 1) ** -law
    sizes = dealing.sizes_like(weights, num_records, smallest)
    owner = dealing.in_turn(random.permutation(num_records), sizes)
    return Federation(records, Shares.of_owners(owner, num_clients), _maybe_test(test))


def shards(source: Source, num_clients: int, *, per_client: int = 2, seed: int = 0, test: Source | None = None) -> Federation:
    """Records sorted by label and cut into shards; every client gets ``per_client`` of them."""
    records = as_records("records", source)
    _check_clients(num_clients * per_client, len(records["y"]))
    by_label, num_shards = records["y"].sort(stable=True).indices.numpy(), num_clients * per_client
    shard = dealing.in_turn(by_label, dealing.even_sizes(len(by_label), num_shards))
    order = torch.randperm(num_shards, generator=generator(seed, "shards")).numpy()
    owner = dealing.in_turn(order, np.full(num_clients, per_client))[shard]
    return Federation(records, Shares.of_owners(owner, num_clients), _maybe_test(test))


def by_user(
    source: Source,
    users: Sequence[Any] | Tensor,
    *,
    test: Source | None = None,
    test_users: Sequence[Any] | Tensor | None = None,
) -> Federation:
    """One client per distinct value of ``users``, which names the owner of every record; ``test_users`` that of the test's."""
    records = as_records("records", source)
    names, owner = np.unique(_owners("users", users, records), return_inverse=True)
    rows, tests = Shares.of_owners(owner, len(names)), _maybe_test(test)
    if test_users is None:
        return Federation(records, rows, tests)
    if tests is None:
        raise InputError("test_users: there are no test records whose owners they could name. Give test, too.")
    theirs = _owners("test_users", test_users, tests)
    place = np.searchsorted(names, theirs).clip(max=len(names) - 1)
    known = np.where(names[place] == theirs, place, -1)
    return Federation(records, rows, tests, Shares.of_owners(known, len(names)))


def _owners(field: str, users: Sequence[Any] | Tensor, records: Records) -> np.ndarray:
    names = np.asarray(users)
    if names.shape != (len(records["y"]),):
        raise InputError(f"{field}: must name one owner per record ({len(records['y'])}), got shape {names.shape}.")
    return names


def _random(seed: int, purpose: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key(seed, purpose)))


def _alike(field: str, sources: Sequence[Source]) -> list[Records]:
    columns = [as_records(f"{field}[{i}]", source) for i, source in enumerate(sources)]
    if not columns:
        raise InputError(f"{field}: the federation has no clients. Give at least one.")
    for i, records in enumerate(columns):
        unlike = [n for n in columns[0] if n not in records or records[n].shape[1:] != columns[0][n].shape[1:]]
        if unlike or set(records) != set(columns[0]):
            raise InputError(f"{field}[{i}]: its columns differ from those of {field}[0]. Bring all to the same shapes.")
    return columns


def _pooled(columns: Sequence[Records]) -> tuple[Records, Shares]:
    """All records as one pool, and the rows of each part."""
    pool = {name: torch.cat([records[name] for records in columns]) for name in columns[0]}
    return pool, Shares(torch.arange(len(pool["y"])), [len(records["y"]) for records in columns])


def _maybe_test(test: Source | None) -> Records | None:
    return None if test is None else as_records("test", test)


def _check_clients(wanted: int, num_records: int, num_clients: int | None = None) -> None:
    if num_clients is not None and wanted != num_clients and not 1 <= num_clients <= wanted <= num_records:
        raise InputError(f"smallest: {num_records} records cannot give {num_clients} clients {wanted} together. Lower it.")
    if not 1 <= wanted <= num_records:
        raise InputError(f"num_clients: cannot deal {num_records} records to {wanted} clients; choose 1 to {num_records}.")


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
