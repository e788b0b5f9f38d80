"""The command line."""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dpfed.errors import InputError

HELP = {
    "run quickstart": "compare three private methods on real pictures, in less than a minute",
    "run quickstart --rounds 5": "change any field of the recipe; --help behind it shows all of them",
    "run fashion/DP-FedAdamW --algorithm.gamma 0.25 --mechanism.epsilon 3 --engine.device cuda": "any method on any task",
    "data RECIPE": "who holds what: a table and a picture",
    "resume RUN": "go on where a run was stopped or killed",
    "report RUN [RUN ...]": "the table, the figure and the privacy statement of runs",
    "report RUN --diagnostics": "drift, moments and noise, of a run made with --diagnostics",
    "ledger RUN": "what the run has cost every client, and what that means; or a client's own store, a file",
    "calibrate --epsilon 3 --num-examples 1000 --batch-size 16 --steps 2000": "the noise that a budget needs",
    "calibrate --epsilon 3 --num-examples 1000 --sigma 1 --find steps": "or the steps, batch-size or participation",
    "bench": "how fast it is on this machine, beside the same without privacy and, if installed, Opacus",
    "audit fashion/DP-FedAdamW": "attack what a recipe charges most for: how much of its epsilon can be shown to be lost",
    "audit DP-SGD --mechanism.epsilon 4 --one-run": "a method by itself; in one run of many canaries. Exit code 1: refuted",
    "list": "the recipes, tasks, data sets, algorithms and mechanisms",
    "published dp-fedadamw swin-base": "what the papers state of a method, a data set, a model, and what not",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Errors that people can act on end with exit code 2, Ctrl-C with 130 and a run that can be resumed."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "run": _run,
        "data": _data,
        "resume": _resume,
        "report": _report,
        "ledger": _ledger,
        "calibrate": _calibrate,
        "bench": _bench,
        "audit": _audit,
        "list": _list,
        "published": _published,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        _help()
        return
    try:
        if words[0] not in commands:
            raise InputError(f"command: there is no '{words[0]}'. Use one of: {', '.join(commands)}.")
        commands[words[0]](words[1:])
    except InputError as error:
        Console(stderr=True, highlight=False).print(Panel(str(error), title="dpfed cannot do this", border_style="red"))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("\nStopped. Nothing is lost: [cyan]dpfed resume[/cyan] goes on from the last checkpoint.")
        raise SystemExit(130) from None


def _help() -> None:
    console = Console(highlight=False)
    console.print("[bold]dpfed[/bold]: federated learning with a privacy guarantee for every single record\n")
    console.print(_two_columns((f"dpfed {command}", meaning) for command, meaning in HELP.items()))
    console.print("\nEvery run is a folder under runs/ that holds the recipe, the rows, the ledger and the weights.")


def _two_columns(lines: Iterable[tuple[str, str]]) -> Padding:
    """Names and what they mean, side by side, so that long lines wrap inside their column."""
    columns = Table.grid(padding=(0, 2))
    columns.add_column(style="cyan", max_width=40)
    for name, meaning in lines:
        columns.add_row(name, meaning)
    return Padding(columns, (0, 2))


def _run(words: list[str]) -> None:
    from dpfed import catalogue
    from dpfed.rounds import begin, free_folder

    if not words or words[0].startswith("-"):
        Console(highlight=False).print(
            "usage: [cyan]dpfed run RECIPE [--out FOLDER] [--FIELD VALUE ...][/cyan]\n\n"
            "RECIPE is [cyan]quickstart[/cyan] or [cyan]TASK/METHOD[/cyan], for example [cyan]fashion/DP-FedAdamW[/cyan]; "
            "[cyan]dpfed list[/cyan] shows all.\n[cyan]dpfed run RECIPE --help[/cyan] shows every field, its meaning and value."
        )
        return
    name, *words = words
    out, words = _option(words, "--out")
    recipes = override(catalogue.recipes(name), words, f"dpfed run {name}")
    folder = Path(out) if out else free_folder(name.replace("/", "-"))
    paths = [folder / recipe.name if len(recipes) > 1 else folder for recipe in recipes]
    _train([begin(recipe, path) for recipe, path in zip(recipes, paths, strict=True)], folder)


def _data(words: list[str]) -> None:
    from dpfed import catalogue
    from dpfed.holdings import federation_figure

    console = Console(highlight=False)
    if not words or words[0].startswith("-"):
        console.print("usage: [cyan]dpfed data RECIPE [--figure FILE] [--FIELD VALUE ...][/cyan]\n\nShows who holds what.")
        return
    name, *words = words
    path, words = _option(words, "--figure")
    recipe = override(catalogue.recipes(name), words, f"dpfed data {name}")[0]
    _, federation = recipe.task.build(recipe.seed)
    console.print(federation.table(), soft_wrap=True)
    figure = federation_figure(federation, path or name.replace("/", "-") + "-data.png")
    console.print(f"Figure   {figure}")


def _resume(words: list[str]) -> None:
    from dpfed.recipe import from_json
    from dpfed.rounds import begin

    def resume(run: Annotated[Path, tyro.conf.Positional]) -> Path:
        """Go on with a run that was stopped or killed.

        Args:
            run: the folder of the run, or one that holds several.
        """
        return run

    folder = tyro.cli(resume, args=words, prog="dpfed resume")
    started: list[tuple[Any, Any]] = []
    for record in _records([folder]):
        plain = {key: value for key, value in record.recipe.items() if key not in ("name", "sigma", "fingerprint")}
        started.append((record, iter(())) if record.finished else begin(from_json(plain), record.path, resume=True))
    _train(started, folder)


def _report(words: list[str]) -> None:
    from dpfed.diagnostics import diagnostics_figure

    def report(
        runs: Annotated[tuple[Path, ...], tyro.conf.Positional], figure: Path | None = None, diagnostics: bool = False
    ) -> None:
        """The table, the figure and the privacy statement of runs.

        Args:
            runs: folders of runs, or folders that hold several.
            figure: where to write the figure (.png, .svg or .pdf); by default figure.png in the first folder.
            diagnostics: draw drift and moments instead, into diagnostics.png; the runs were made with --diagnostics.
        """
        if not runs:
            raise InputError("runs: name at least one folder of a run.")
        if diagnostics:
            path = diagnostics_figure(_records(runs), figure or runs[0] / "diagnostics.png")
            Console(highlight=False).print(f"Figure   {path}")
        else:
            _show(_records(runs), figure or runs[0] / "figure.png")

    tyro.cli(report, args=words, prog="dpfed report")


def _ledger(words: list[str]) -> None:
    def ledger(run: Annotated[Path, tyro.conf.Positional], delta: float | None = None) -> None:
        """What a run has cost every client, and what that means; or what one client has spent, by its own store.

        Args:
            run: the folder of a run, or one that holds several; or the file of a client's ledger store.
            delta: the probability with which epsilon may fail; by default the run's own, or the store's.
        """
        from dpfed.ledger import EVERYBODY

        if run.is_file():
            _show_store(run, delta)
            return
        console = Console(highlight=False)
        for record in _records([run]):
            at, rounds = record.delta if delta is None else delta, dict[int, set[int]]()
            for receipt in record.ledger:
                rounds.setdefault(receipt.client, set()).add(receipt.t)
            rows = [
                ("all" if i == EVERYBODY else str(i), len(rounds[i]), record.ledger.events(i), epsilon)
                for i, epsilon in record.ledger.epsilons(at).items()
            ]
            _show_spending(f"{record.recipe['name']}  ({record.path})", "client", rows, at)
            console.print(record.ledger.statement(at))

    tyro.cli(ledger, args=words, prog="dpfed ledger")


def _show_store(path: Path, delta: float | None) -> None:
    from dpfed.ledger import epsilon, upwards
    from dpfed.store import Store

    store = Store(path)
    at, ledger = store.delta if delta is None else delta, store.ledger()
    runs: dict[str, list[Any]] = {}
    for charge in store.charges():
        runs.setdefault(charge.run, []).append(charge.events)
    spent = {run: sum(events, Counter[Any]()) for run, events in runs.items()}
    rows = [(run, len(runs[run]), events, epsilon(events, at)) for run, events in spent.items()]
    _show_spending(str(path), "run", rows, at)
    console = Console(highlight=False)
    console.print(ledger.statement(at))
    console.print(
        f"Budget: epsilon = {store.epsilon:g} at delta = {store.delta:g}, spent: {upwards(ledger.epsilon(store.delta))}."
    )


def _show_spending(title: str, what: str, rows: Iterable[tuple[str, int, Any, float]], delta: float) -> None:
    from dpfed.ledger import upwards

    table = Table(title=title, title_justify="left")
    for column in (what, "records", "rounds", "releases", "sigma", f"epsilon at delta {delta:g}"):
        table.add_column(column, justify="right")
    for name, num_rounds, events, epsilon in rows:
        sizes, sigmas = (sorted({event.num_examples for event in events}), sorted({f"{event.sigma:.4g}" for event in events}))
        number = str(sum(events.values()))
        table.add_row(name, ", ".join(map(str, sizes)), str(num_rounds), number, ", ".join(sigmas), upwards(epsilon))
    Console(highlight=False).print(table)


def _calibrate(words: list[str]) -> None:
    from dpfed.ledger import Event, batch_size_within, calibrate, epsilon, participation_within, rounds_within, upwards

    def search(
        num_examples: tuple[int, ...],
        find: Literal["sigma", "steps", "batch-size", "participation"] = "sigma",
        sigma: float | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        local_steps: int = 1,
        epsilon_: Annotated[float, tyro.conf.arg(name="epsilon")] = 3.0,
        delta: float = 1e-5,
        sampling: Literal["poisson", "fixed"] = "poisson",
        accountant: Literal["pld", "rdp"] = "pld",
    ) -> None:
        """The noise, steps, batch size or participation with which no client spends more than the budget.

        Args:
            num_examples: records of the client; several numbers for several clients, together and each on its own.
            find: sigma: the least noise. steps: the most of them, up to ten million rounds. batch-size: the largest.
                participation: the largest rate at which clients may join every round by an independent coin (how the coins
                fall is part of delta).
            sigma: noise multiplier (unless it is to be found).
            steps: noisy gradients that a client releases: rounds it takes part in, times local steps (unless to be found).
            batch_size: expected batch size (unless to be found); by default 64.
            local_steps: steps of one round.
            epsilon_: the budget.
            delta: the probability with which epsilon may fail.
            sampling: poisson (neighbours add or remove a record) or fixed (neighbours replace one; costs much more).
            accountant: pld (tight) or rdp (as in the papers).
        """
        batch_size = 64 if batch_size is None and find != "batch-size" else batch_size
        for name, value in (("sigma", sigma), ("steps", steps), ("batch-size", batch_size)):
            if (value is None) != (name == find):
                said = "was given, but is to be found. Leave it out" if name == find else "is missing. Give a number"
                raise InputError(f"--{name}: {said}, or change --find {find}.")
        rounds, rest = divmod(local_steps if steps is None else steps, max(local_steps, 1))
        if local_steps < 1 or rounds < 1 or rest:
            raise InputError(f"--steps: must be whole rounds of {local_steps} local steps (at least 1 each), got {steps}.")
        if not num_examples:
            raise InputError("--num-examples: name at least one client by its number of records.")
        count, by_coin = steps or local_steps, find == "participation"

        def plan(size: int, value: Any) -> dict[Event, int]:
            """Of all rounds, or of the one that is then repeated."""
            now: dict[str, Any] = {"sigma": sigma, "batch-size": batch_size, find: value}
            return {Event(sampling, now["batch-size"], size, now["sigma"]): local_steps if by_coin else count}

        def answer(*sizes: int) -> float:
            plans = [plan(size, 1) for size in sizes]
            if find == "sigma":
                return calibrate(epsilon_, delta, plans, accountant)
            if find == "batch-size":
                return batch_size_within(epsilon_, delta, plans, accountant)
            if find == "participation":
                return participation_within(epsilon_, delta, plans, rounds, accountant)
            return local_steps * rounds_within(epsilon_, delta, plans, accountant)

        def show(value: float, size: int, head: str = "") -> None:
            value = math.ceil(value * 1e4) / 1e4 if find == "sigma" else value  # never rounded down
            times, rate = (rounds, value) if by_coin else (int(value) // local_steps, 1.0) if find == "steps" else (1, 1.0)
            spent = plan(size, value)
            cost, event = epsilon(spent, delta, accountant, rounds=times, rate=rate), next(iter(spent))
            number = f"{rounds} rounds of {local_steps}" if by_coin else f"{count * times}"
            shown = f"{value:.4f}" if find == "sigma" else str(value)
            setting = f"{number} steps of {event.batch_size} out of {size} records, {sampling} sampling"
            Console(highlight=False).print(
                f"{head}{find} = [bold]{shown}[/bold]   ({setting}: epsilon = {upwards(cost)} at delta = {delta:g})"
            )

        values = {size: answer(size) for size in sorted(set(num_examples))}
        common = answer(*values)
        if not min(values.values()):
            raise InputError(f"--epsilon: not even the least {find} fits the budget of {epsilon_:g}. Raise it, or the noise.")
        show(common, min(values), "For all: " if len(values) > 1 else "")
        for size, value in values.items() if len(values) > 1 else ():
            show(value, size, f"Of {size} records alone: ")

    tyro.cli(search, args=words, prog="dpfed calibrate")


def _bench(words: list[str]) -> None:
    def bench(device: str = "auto", seconds: float = 6.0) -> None:
        """How fast it is on this machine, in less than a minute; benchmarks/README.md has the long versions.

        Args:
            device: auto takes a GPU where there is one; or cpu, cuda, cuda:1.
            seconds: for each of the four tables; fewer give fewer turns, never fewer than three.
        """
        from dpfed import bench
        from dpfed.engines.simulation import Simulation

        console, where = Console(highlight=False), Simulation(device=device).torch_device()
        console.print(f"{bench.machine(where)}\n")
        for work in bench.works():
            title = f"{work.name}: one step of {work.num_clients} clients x {work.batch_size} records"
            table = Table("", "ms", "x private", title=title, title_justify="left")
            for line in bench.compare(work, where, seconds):
                table.add_row(line.name, f"{line.milliseconds:.2f}", f"{line.ratio:.2f}")
            console.print(table)
        table = Table("clients", "CPU ms", title="A whole round of a run", title_justify="left")
        for cohort, milliseconds in bench.rounds(where, seconds / 2):
            table.add_row(str(cohort), f"{milliseconds:.2f}")
        console.print(table)
        console.print("(linear 20 -> 2, one local step on 8 of 20 records, private; without the wait for the disk)")
        waits = "Besides, every round waits until its charge is on the disk"
        console.print(f"{waits} (fsync): {bench.fsync_milliseconds():.2f} ms here.")

    tyro.cli(bench, args=words, prog="dpfed bench")


def _audit(words: list[str]) -> None:
    from dpfed import algorithms, catalogue
    from dpfed.audit import audit, audit_one_run
    from dpfed.canaries import Alone
    from dpfed.mechanism import Gaussian
    from dpfed.recipe import Recipe

    console = Console(highlight=False)
    if not words or words[0].startswith("-"):
        console.print(
            "usage: [cyan]dpfed audit RECIPE|METHOD [--trials 4000] [--confidence 0.999] [--one-run] [--FIELD VALUE ...][/cyan]"
            "\n\nThe running code is attacked: a record with a known, huge gradient (a canary) is put into half of the trials, "
            "and who sees all that is released has to tell the halves apart. What that proves is a lower bound on epsilon. "
            "Above the claim it refutes it, and the exit code is 1. Below, it is no proof that the claim holds, but says how "
            "near an attacker comes.\n\n"
            "[cyan]RECIPE[/cyan], such as fashion/DP-FedAdamW: the client that it charges most, with its rate, rounds, steps.\n"
            "[cyan]METHOD[/cyan], such as DP-SGD: one step of one client, all records in the batch; change that by "
            "[cyan]--rounds[/cyan], [cyan]--local-steps[/cyan], [cyan]--task.num-examples[/cyan], "
            "[cyan]--mechanism.batch-size[/cyan] and any other field.\n"
            "[cyan]--one-run[/cyan]: a single run of many canaries, instead of many trials of one.\n"
            "[cyan]--trials[/cyan]: more of them prove more, and take longer; with --one-run, the number of canaries."
        )
        return
    name, *words = words
    trials, words = _option(words, "--trials")
    confidence, words = _option(words, "--confidence")
    one_run, words = "--one-run" in words, [word for word in words if word != "--one-run"]
    if name in catalogue.methods() and name.startswith("DP-"):
        algorithm = getattr(algorithms, name.removeprefix("DP-"))()
        few = 64 if one_run else 16
        found = [Recipe(Alone(few), algorithm, Gaussian(epsilon=4.0, batch_size=few), rounds=1, local_steps=1, cohort=1)]
    else:
        found = catalogue.recipes(name)
    setting: dict[str, Any] = {"confidence": _number("--confidence", confidence, float, 0.999)}
    setting["num_canaries" if one_run else "num_trials"] = _number("--trials", trials, int, 4000)
    passed = True
    for recipe in override(found, words, f"dpfed audit {name}"):
        with console.status(f"Attacking {recipe.name} ..."):
            result = audit_one_run(recipe, **setting) if one_run else audit(recipe, **setting)
        console.print(f"[bold]{recipe.name}[/bold]  {result.report()}", soft_wrap=True)
        passed = passed and result.passed
    if not passed:
        raise SystemExit(1)


def _number(name: str, text: str | None, kind: type[Any], otherwise: Any) -> Any:
    try:
        return otherwise if text is None else kind(text)
    except ValueError:
        raise InputError(f"{name}: must be a number, got {text!r}.") from None


def _published(words: list[str]) -> None:
    from dpfed.published import described, entries, plain

    def show(about: Annotated[tuple[str, ...], tyro.conf.Positional] = ()) -> None:
        """What the papers state, and what they do not: dpfed published DP-FedAdamW CIFAR-100 Swin-Base.

        Args:
            about: parts of the names of methods, data sets and models; all of them have to fit.
        """
        found = [entry for names, entry in entries().items() if all(any(plain(w) in name for name in names) for w in about)]
        if not found:
            raise InputError(f"about: no paper has {' '.join(about)}. `dpfed published` shows all.")
        print("\n".join(map(described, found)))

    tyro.cli(show, args=words, prog="dpfed published")


def _list(words: list[str]) -> None:
    from dpfed import algorithms, catalogue
    from dpfed.mechanism import AsReleased, Gaussian, Plain
    from dpfed.tasks.folders import data_root

    def show() -> None:
        """The recipes, tasks, data sets, algorithms and mechanisms."""
        tasks: dict[str, list[str]] = {}
        for name, make in catalogue.TASKS.items():
            tasks.setdefault(_summary(make()), []).append(name)
        sections = {
            "Recipes  (dpfed run RECIPE)": [
                ("quickstart", catalogue.quickstart.__doc__ or ""),
                ("TASK/METHOD", f"any task below, with any METHOD of {', '.join(catalogue.methods())}"),
                (
                    "TASK/as-released/METHOD",
                    "the same with the mechanism of the released code of DP-FedAdamW, which is not private",
                ),
            ],
            "Tasks": [(", ".join(names), summary) for summary, names in tasks.items()],
            f"Data sets  (under {data_root()}; DPFED_DATA names another folder)": [
                (data_set.name, "there" if data_set.is_there() else f"not there; from {data_set.source}")
                for data_set in catalogue.DATA_SETS
            ],
            "Algorithms": [(name, _summary(sys.modules[getattr(algorithms, name).__module__])) for name in algorithms.__all__],
            "Mechanisms": [(kind.__name__, _summary(kind)) for kind in (Gaussian, Plain, AsReleased)],
        }
        console = Console(highlight=False)
        for title, lines in sections.items():
            console.print(f"[bold]{title}[/bold]")
            console.print(_two_columns(lines))

    tyro.cli(show, args=words, prog="dpfed list")


def _summary(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return " ".join((thing.__doc__ or "").strip().split("\n\n")[0].split())


def override(recipes: list[Any], words: list[str], prog: str) -> list[Any]:
    """The recipes with fields changed from the command line. A field that only some of the recipes have is changed in those."""
    changed: list[Any] = []
    unknown: list[list[str]] = []
    for recipe in recipes:
        kind = _concrete(recipe)
        options, rest = tyro.cli(kind, default=_converted(recipe, kind), args=words, prog=prog, return_unknown_args=True)
        changed.append(_converted(options, type(recipe)))
        unknown.append(rest)
    for word in words:
        if all(word in rest for rest in unknown):
            raise InputError(f"{word}: no such field in this recipe. `{prog} --help` shows all of them.")
    return changed


def _concrete(value: Any) -> type[Any]:
    """A dataclass like the value's own, whose fields have the types that their values have: what a command line can show."""
    hints = typing.get_type_hints(type(value))
    fields: list[tuple[str, Any]] = []
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        fields.append((field.name, type(inner) if dataclasses.is_dataclass(inner) else hints[field.name]))
    made = dataclasses.make_dataclass(type(value).__name__, fields, frozen=True)
    made.__doc__ = type(value).__doc__  # its Args become the help
    return made


def _converted(value: Any, kind: type[Any]) -> Any:
    return kind(**{field.name: getattr(value, field.name) for field in dataclasses.fields(value)})


def _option(words: list[str], name: str) -> tuple[str | None, list[str]]:
    """Take one ``--name value`` out of the words."""
    words = [piece for word in words for piece in (word.split("=", 1) if word.startswith(f"{name}=") else [word])]
    if name not in words:
        return None, words
    at = words.index(name)
    if at + 1 == len(words):
        raise InputError(f"{name}: needs a value.")
    return words[at + 1], words[:at] + words[at + 2 :]


def _records(folders: Sequence[Path]) -> list[Any]:
    """The runs in the folders, each of which is a run or holds runs."""
    from dpfed.record import RunRecord

    found: list[Any] = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob("*/ledger.jsonl")) if folder.is_dir() else []
        found += [RunRecord.open(path) for path in inside] or [RunRecord.open(folder)]
    return found


def _train(started: list[tuple[Any, Any]], folder: Path) -> None:
    """Draw the rows of the runs, one run after the other, and show how it goes."""
    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
    )
    console = Console(highlight=False)
    for text in dict.fromkeys(record.environment.get("engine") for record, _ in started):
        console.print(f"Engine   {text}")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bars = [
            progress.add_task(
                record.recipe["name"],
                total=record.recipe["rounds"],
                completed=len(record.rows),
                now="done" if record.finished else "waiting",
            )
            for record, _ in started
        ]
        for (record, rows), bar in zip(started, bars, strict=True):
            progress.reset(bar, total=record.recipe["rounds"], completed=len(record.rows))
            for row in rows:
                for note in row.get("notes", ()):
                    console.print(f"Engine   {note}")
                said = {"accuracy": "accuracy {:.1%}", "loss": "loss {:.3f}", "epsilon": "epsilon {:.2f}"}
                now = "  ".join(text.format(row[name]) for name, text in said.items() if name in row)
                progress.update(bar, completed=row["t"] + 1)
                if now:
                    progress.update(bar, now=now)
                every = max(1, record.recipe["rounds"] // 5)
                if not console.is_terminal and now and (row["t"] + 1) % every == 0:
                    console.print(f"{record.recipe['name']:>14}  round {row['t'] + 1}/{record.recipe['rounds']}  {now}")
            progress.update(bar, now="done" if not record.rows else progress.tasks[bar].fields["now"])
    _show([record for record, _ in started], folder / "figure.png")


def _show(records: list[Any], figure_path: Path) -> None:
    from dpfed.report import figure, table

    console = Console(highlight=False)
    console.print()
    Console(highlight=False, width=max(console.width, 160)).print(table(records))  # a terminal may break lines; nothing is cut
    if drawn := any("accuracy" in row for record in records for row in record.rows):
        figure(records, figure_path)
    statements: dict[str, list[str]] = {}
    for record in records:
        statements.setdefault(record.statement(), []).append(record.recipe["name"])
    for statement, names in statements.items():
        console.print(Panel(statement, title=f"Privacy: {', '.join(names)}", title_align="left", border_style="green"))
    if drawn:
        console.print(f"Figure   {figure_path}")
    for record in records:
        for row in record.rows[-1:]:
            if "ended_by" in row:
                console.print(f"Ended    {record.recipe['name']} after {row['t'] + 1} rounds, by {row['ended_by']}")
        console.print(f"Record   {record.path}")


if __name__ == "__main__":
    main()
