"""The rules of the house, read off the source itself, so that they also hold for the file that is written tomorrow."""

from __future__ import annotations

import ast
import re
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the ground to the roof: a module imports only what stands before it. A folder is one storey, named with a slash.
ORDER = (
    "errors",
    "disk",
    "secure",
    "keyed",
    "dropout",
    "fast",
    "compiled",
    "fast_lora",
    "metrics",
    "flat",
    "augment",
    "columns",
    "dealing",
    "data",
    "mixture",
    "accountants",
    "planning",
    "ledger",
    "store",
    "mechanism",
    "privacy",
    "pieces",
    "kernels",
    "algorithm",
    "algorithms/",
    "alternating",
    "optim",
    "engines/",
    "models/",
    "tasks/",
    "report",
    "diagnostics",
    "holdings",
    "record",
    "memories",
    "adapters",
    "tables",
    "recipe",
    "published",
    "forecast",
    "client",
    "rounds",
    "catalogue",
    "evidence",
    "canaries",
    "audit",
    "bench",
    "__init__",
    "__main__",
)

METHODS = ["server_init", "client_init", "local_step", "upload", "server_step"]

UNSAFE = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
UNSAFE |= {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
DERIVATIVES = ("grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize")
RAW_GRADIENTS = {f"torch.func.{name}" for name in DERIVATIVES}
RAW_GRADIENTS |= {f"torch.autograd.{name}" for name in ("grad", "backward", "functional", "forward_ad")}

VAGUE_WORDS = {"util", "utils", "helper", "helpers", "cfg", "manager", "handler", "wrapper"}
VAGUE_NAMES = {"args", "base"}


def parse(*folders: str) -> dict[str, ast.Module]:
    """Every Python file below the folders as a tree, by its path from the root of the repository."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


DPFED = parse("dpfed")
OURS = DPFED | parse("recipes", "benchmarks", "tests")
ALGORITHMS = {path: tree for path, tree in DPFED.items() if re.match(r"dpfed/algorithms/(?!__init__)", path)}

each_module = pytest.mark.parametrize("path", DPFED)
each_algorithm = pytest.mark.parametrize("path", ALGORITHMS)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Pairs (full dotted origin, the name it gets here) of every import in the file, also of those inside functions."""
    package = path.rpartition("/")[0].split("/")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname or "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*parents, *filter(None, [node.module])])
            yield from ((f"{origin}.{alias.name}", alias.asname or alias.name) for alias in node.names)


def references(path: str, tree: ast.Module) -> set[str]:
    """Every dotted name the file imports or uses, with aliases resolved: `import torch as t; t.load` is torch.load."""
    found = {origin for origin, _ in imports(path, tree)}
    origin_of = {name: origin for origin, name in imports(path, tree) if name}
    for node in ast.walk(tree):
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            found.add(".".join([origin_of.get(node.id, node.id), *attributes]))
    return found


def within(names: set[str], roots: set[str]) -> set[str]:
    """Those of the dotted names that are one of the roots or lie inside one."""
    return {name for name in names if any(f"{name}.".startswith(f"{root}.") for root in roots)}


def calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


# (a) Imports point downwards.


def storey(path: str) -> int:
    first, slash, _ = path.removeprefix("dpfed/").removesuffix(".py").partition("/")
    return ORDER.index(first + slash)


def imported_files(path: str, tree: ast.Module) -> set[str]:
    """The files of dpfed that this one imports; a name that is no module itself comes from the module around it."""
    files = {module_name(file): file for file in DPFED}
    origins = within({origin for origin, _ in imports(path, tree)}, {"dpfed"})
    return {files.get(origin) or files[origin.rpartition(".")[0]] for origin in origins}


@each_module
def test_every_module_has_its_storey(path: str) -> None:
    assert storey(path) >= 0, "give the new module its place in ORDER"


@each_module
def test_imports_point_downwards(path: str) -> None:
    for other in imported_files(path, DPFED[path]):
        same_folder = Path(path).parent == Path(other).parent != Path("dpfed")
        assert storey(other) < storey(path) or same_folder, f"{path} imports {other}, which does not stand below it"


@each_algorithm
def test_algorithms_do_not_import_one_another(path: str) -> None:
    assert not {other for other in imported_files(path, DPFED[path]) if other.startswith("dpfed/algorithms/")}


@each_module
def test_the_library_does_not_import_the_recipes(path: str) -> None:
    assert not within({origin for origin, _ in imports(path, DPFED[path])}, {"recipes"})


# (b) The public names.


def test_all_lists_the_public_names_in_order() -> None:
    import dpfed  # here, so that the other rules can be read off a package that does not import

    source = (ROOT / "dpfed" / "__init__.py").read_text(encoding="utf-8")
    symbols = symtable.symtable(source, "__init__.py", "exec").get_symbols()
    bound = {symbol.get_name() for symbol in symbols if symbol.is_imported() or symbol.is_assigned()}
    assert set(dpfed.__all__) == {name for name in bound - {"annotations"} if not name.startswith("_")}
    assert not [name for name in dpfed.__all__ if not hasattr(dpfed, name)]
    # CONSTANTS, then Classes, then functions: the order that ruff keeps (RUF022).
    assert list(dpfed.__all__) == sorted(dpfed.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))


# (c) Nothing that is read can run code.


@each_module
def test_nothing_that_is_read_can_run_code(path: str) -> None:
    assert not within(references(path, DPFED[path]), UNSAFE)
    settings = [ast.unparse(keyword) for call in calls(DPFED[path]) for keyword in call.keywords]
    assert {setting for setting in settings if setting.startswith("allow_pickle=")} <= {"allow_pickle=False"}


# (d) Raw gradients exist in one file.


PEERS = "dpfed/bench.py"  # times an ordinary loop and Opacus beside the library, on the packaged pictures


def test_the_peers_see_the_packaged_pictures_only() -> None:
    tasks = {name for name in references(PEERS, DPFED[PEERS]) if name.startswith("dpfed.tasks")}
    assert tasks == {"dpfed.tasks.FashionMini", "dpfed.tasks.Task"}
    assert not [path for path, tree in DPFED.items() if PEERS in imported_files(path, tree) and path != "dpfed/__main__.py"]


@pytest.mark.parametrize("path", [path for path in DPFED if path not in ("dpfed/privacy.py", PEERS)])
def test_raw_gradients_exist_only_in_privacy(path: str) -> None:
    assert not within(references(path, DPFED[path]), RAW_GRADIENTS)
    methods = {call.func.attr for call in calls(DPFED[path]) if isinstance(call.func, ast.Attribute)}
    assert "backward" not in methods


def test_privacy_is_where_the_gradients_are() -> None:
    assert within(references("dpfed/privacy.py", DPFED["dpfed/privacy.py"]), RAW_GRADIENTS)


# (e) One algorithm, one file, one shape.


def test_there_are_algorithms() -> None:
    assert ALGORITHMS


@each_algorithm
def test_an_algorithm_is_one_frozen_dataclass_with_five_methods(path: str) -> None:
    classes = [node for node in ast.walk(ALGORITHMS[path]) if isinstance(node, ast.ClassDef)]
    decorators = {node.name: [ast.unparse(decorator) for decorator in node.decorator_list] for node in classes}
    [algorithm] = [node for node in classes if decorators[node.name]]
    [decorator] = decorators[algorithm.name]
    assert re.fullmatch(r"(dataclasses\.)?dataclass\(.*\bfrozen=True\b.*\)", decorator)
    assert not algorithm.name.startswith("_")
    assert not algorithm.bases + algorithm.keywords, "an algorithm has no base class"
    for other in classes:
        assert other is algorithm or [ast.unparse(parent) for parent in other.bases] == ["NamedTuple"], other.name

    fields = [node for node in algorithm.body if isinstance(node, ast.AnnAssign)]
    methods = [node for node in algorithm.body if isinstance(node, ast.FunctionDef)]
    assert [method.name for method in methods] == METHODS
    docstring = 1 if ast.get_docstring(algorithm) else 0
    assert len(algorithm.body) == docstring + len(fields) + len(methods), "only fields stand beside the five methods"


@each_algorithm
def test_an_algorithm_is_short_and_owns_no_loop(path: str) -> None:
    most = 130 if path.endswith("fed_adamw.py") else 100
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= most
    assert not [node.lineno for node in ast.walk(ALGORITHMS[path]) if isinstance(node, ast.For | ast.While)]


@each_algorithm
def test_an_algorithm_says_where_it_departs_from_the_paper(path: str) -> None:
    assert "Departs from the paper" in (ast.get_docstring(ALGORITHMS[path]) or "")


def told_lines(path: str, with_fields: bool) -> list[str]:
    """What a file says itself: its lines without docstrings, imports, blanks and the signatures of the methods.

    Without its fields, too, if so asked: they are the signature of the constructor, and algorithms of one family are meant to
    have the same names and defaults there, as in torch.optim.
    """
    silent = set[int]()
    for node in ast.walk(ALGORITHMS[path]):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                silent |= set(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.AnnAssign(value=ast.expr()) if not with_fields:
                silent |= set(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.FunctionDef():
                silent |= set(range(node.lineno, node.body[0].lineno))
            case _:
                continue
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return [line.strip() for number, line in enumerate(lines, 1) if number not in silent and line.strip()]


def num_repeated(lines: list[str], others: list[list[str]], run: int) -> int:
    """How many of the lines stand in a run of at least so many that another file has, too, word for word."""
    known = {tuple(other[at : at + run]) for other in others for at in range(len(other) - run + 1)}
    starts = [at for at in range(len(lines) - run + 1) if tuple(lines[at : at + run]) in known]
    return len({at + step for at in starts for step in range(run)})


@pytest.mark.parametrize(("with_fields", "run"), [(True, 6), (False, 5)])
def test_siblings_repeat_little_of_one_another(with_fields: bool, run: int) -> None:
    told = {path: told_lines(path, with_fields) for path in ALGORITHMS}
    repeated = {path: num_repeated(told[path], [told[other] for other in told if other != path], run) for path in told}
    share = sum(repeated.values()) / sum(map(len, told.values()))
    assert share < 0.08, f"{share:.1%} of their lines: {sorted(repeated.items(), key=lambda item: -item[1])}"


def test_the_measure_of_repetition_measures() -> None:
    assert num_repeated(list("abcdxy"), [list("zabcd")], 4) == 4
    assert num_repeated(list("abcdexy"), [list("zabcde")], 4) == 5
    assert num_repeated(list("abcxy"), [list("zabc")], 4) == 0
    lines = told_lines("dpfed/algorithms/fed_avg.py", with_fields=True)
    assert {"@dataclass(frozen=True)", "lr: float = 0.1", "return Weights(theta)"} <= set(lines)
    assert not [line for line in lines if line.startswith(("def ", "from ", "import ", '"""'))]
    assert "lr: float = 0.1" not in told_lines("dpfed/algorithms/fed_avg.py", with_fields=False)


# (f) Names say something.


def names_given(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name the file gives to a function, class, parameter, variable, attribute or import, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield name, node.lineno
            case _:
                continue


def is_vague(name: str) -> bool:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return name.strip("_").lower() in VAGUE_NAMES or not VAGUE_WORDS.isdisjoint(word.lower() for word in words)


@pytest.mark.parametrize("path", OURS)
def test_names_say_something(path: str) -> None:
    assert not [part for part in path.removesuffix(".py").split("/") if is_vague(part)]
    assert not [f"{path}:{line} {name}" for name, line in names_given(OURS[path]) if is_vague(name)]


# (g) What the README says can be typed.


def test_commands_of_the_readme_are_make_targets() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"(?:^|`)(?:\$ )?make ([a-z]+)", readme, flags=re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"run", "test"} <= commands <= targets


# (h) The product knows nothing about the machine it was written on.


def test_no_file_names_a_machine_or_a_package_index() -> None:
    traces = [b"/" + place + b"/" for place in (b"work", b"root")] + [b"index" + b"-url", b"find" + b"-links"]
    made = re.compile(r"\.(?!ci|github|gitignore)|__pycache__|build$|dist$|runs$|carry$|.*\.egg-info")
    parts = {file: file.relative_to(ROOT).parts for file in ROOT.rglob("*") if file.is_file()}
    files = [file for file in parts if not any(made.match(part) for part in parts[file])]
    assert ROOT / "Makefile" in files
    assert not [(file, trace) for file in files for trace in traces if trace in file.read_bytes()]


# (i) Nobody waits for what is not needed.


def test_the_command_line_starts_without_what_few_commands_need() -> None:
    heavy = ("matplotlib", "scipy", "dp_accounting", "transformers", "peft", "datasets", "opacus", "sympy", "torch._dynamo")
    code = f"import sys, dpfed, dpfed.__main__; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


# The readers above are themselves put to the test: each has to see an offence.


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch as t\nt.load('x')", "torch.load"),
        ("from torch import load as open_file", "torch.load"),
        ("from torch.func import grad_and_value", "torch.func.grad_and_value"),
        ("from torch import func\ndef f():\n    return func.vjp", "torch.func.vjp"),
        ("import torch.autograd\ntorch.autograd.grad(1, 2)", "torch.autograd.grad"),
        ("print(eval('1'))", "eval"),
        ("from ..rounds import run", "dpfed.rounds.run"),
        ("from . import simulation", "dpfed.engines.simulation"),
    ],
)
def test_references_see_through_aliases(source: str, name: str) -> None:
    assert name in references("dpfed/engines/example.py", ast.parse(source))


@pytest.mark.parametrize("name", ["utils", "_base", "args", "RoundManager", "error_handler", "HTTPWrapper", "cfg"])
def test_vague_names_are_seen(name: str) -> None:
    assert is_vague(name)
    assert not is_vague("block_mean")
    assert not is_vague("base_learning_rate")
