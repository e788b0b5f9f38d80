"""The settings of the papers, so that a run can say "as in the paper", and say where the paper is silent.

>>> found = published("DP-FedAdamW", "CIFAR-10", "GN-ResNet-18")
>>> found.algorithm.lr, found.algorithm.gamma, found.mechanism.clip, found.mechanism.sigma
(0.0003, 0.5, 0.1, 1.0)
>>> found.setting.num_clients, found.setting.rounds, found.setting.local_steps, found.setting.cohort
(50, 300, 50, 10)

What a paper does not state is not made up. It has to be given, and the refusal says what is known about it:

>>> published("DP-FedAdamW", "CIFAR-100", "Swin-Base")
Traceback (most recent call last):
    ...
dpfed.errors.InputError: lr: the paper says only where it searched: 1e-4, 2e-4, 3e-4, 5e-4, 8e-4, 1e-3. Give one.
>>> published("DP-FedAdamW", "CIFAR-100", "Swin-Base", lr=3e-4).setting.rounds
100

``published(...).recipe(task)`` is the run; the task has the model and the federation that ``setting`` describes. The papers:
DP-FedAdamW (Liu et al., CVPR 2026), FedAdamW (Liu et al., AAAI 2026), DP-AdamW (Chooi et al., 2025), and the run script of
DP-MicroAdam (Hudisteanu et al., 2025).
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, NamedTuple, cast

from dpfed import algorithms
from dpfed.algorithm import Algorithm
from dpfed.errors import InputError
from dpfed.pieces import Schedule
from dpfed.privacy import Gaussian, Plain
from dpfed.recipe import AnyTask, Recipe


class Setting(NamedTuple):
    """Who trains on what: N clients with their Dirichlet alphas, T rounds, K steps, S clients a round, B records a batch."""

    num_clients: int
    alphas: tuple[float, ...]
    rounds: int
    local_steps: int
    cohort: int
    batch_size: int
    source: str
    schedule: Schedule = "cosine"


class Entry(NamedTuple):
    """A method on a data set and model: what its paper states, and for what it does not state, what is known of that.

    Beside the algorithm's fields: clip, sigma, epsilon, delta. Where the paper has a value for each epsilon, all of them.
    """

    names: tuple[str, str, str]
    algorithm: type[Any]
    setting: Setting
    stated: dict[str, Any]
    silent: dict[str, str]


class Published(NamedTuple):
    """The settings of a run, and which of them are yours and not the paper's."""

    algorithm: Algorithm
    mechanism: Gaussian | Plain
    setting: Setting
    delta: float
    yours: tuple[str, ...]

    def recipe(self, task: AnyTask, **changes: Any) -> Recipe:
        """The run on a task; ``changes`` are fields of the recipe: seed, engine, rounds."""
        settings: dict[str, Any] = {
            name: getattr(self.setting, name) for name in ("rounds", "local_steps", "cohort", "schedule")
        }
        settings |= {"delta": self.delta} | changes
        return Recipe(task, self.algorithm, self.mechanism, **settings)


def published(method: str, dataset: str, model: str, **given: Any) -> Published:
    """The settings of a paper's table, by the paper's names: ("DP-FedAdamW", "CIFAR-100", "Swin-Base"), ("Local AdamW", ...).

    ``given`` are fields of the algorithm, or clip, delta, sigma or epsilon: what the paper is silent on must be among them,
    what it states may be. ``Published.yours`` says which of them the paper does not have.
    """
    entry = entries().get((plain(method), plain(dataset), plain(model)))
    if entry is None:
        raise InputError(f"published: no paper has {method} on {dataset} with {model}. `dpfed published` lists what they have.")
    stated, yours = dict(entry.stated), dict(given)
    if "epsilon" in given and "sigma" not in given:
        stated.pop("sigma", None)
    for name, value in entry.stated.items():
        if isinstance(value, dict) and name not in given:
            by_epsilon = cast(dict[float, float], value)
            if given.get("epsilon") not in by_epsilon:
                raise InputError(
                    f"epsilon: the paper has {', '.join(f'{e:g}' for e in by_epsilon)}; got {given.get('epsilon')}."
                )
            stated[name] = by_epsilon[yours.pop("epsilon")]
    for name, words in entry.silent.items():
        if name not in given:
            raise InputError(f"{name}: {words}. Give one.")
    values = stated | given
    mechanism = {name: values.pop(name) for name in ("clip", "sigma", "epsilon") if name in values}
    delta, setting = values.pop("delta", 1e-5), entry.setting
    unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(entry.algorithm)})
    if unknown:
        raise InputError(f"{unknown[0]}: {entry.algorithm.__name__} has no such setting.")
    kind = Gaussian if mechanism else Plain
    own = tuple(name for name in yours if entry.stated.get(name) != yours[name])
    return Published(entry.algorithm(**values), kind(batch_size=setting.batch_size, **mechanism), setting, delta, own)


def described(entry: Entry) -> str:
    """In words: what is stated, and what is not."""
    setting, lines = entry.setting, [" on ".join(entry.names[:2]) + f" with {entry.names[2]}  ({entry.setting.source})"]
    clients = f"{setting.num_clients} clients" + (
        f", Dirichlet {' or '.join(map(str, setting.alphas))}" if setting.alphas else ""
    )
    lines.append(
        f"  {clients}; {setting.cohort} in a round, {setting.rounds or '?'} rounds of {setting.local_steps} steps; batches"
    )
    lines[-1] += f" of {setting.batch_size}; {setting.schedule} learning rate"
    lines += [f"  {name} = {value}" for name, value in entry.stated.items()]
    return "\n".join(lines + [f"  {name}: {words}" for name, words in entry.silent.items()])


def plain(name: str) -> str:
    """A name without what people write differently: DP-FedAvg-LS and dp fedavgls are one."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


SEARCHED = "the paper says only where it searched: "
SGD_LR = {"lr": SEARCHED + "0.01, 0.03, 0.05, 0.1, 0.3"}
ADAM_LR = {"lr": SEARCHED + "1e-4, 2e-4, 3e-4, 5e-4, 8e-4, 1e-3"}
PLAIN_LR = {"lr": SEARCHED + "1e-4, 3e-4, 5e-4, 8e-4, 1e-3"}
SERVER_LR = {"server_lr": "the paper does not say; the FedOpt paper searches 1e-3, 1e-2, 1e-1"}
MIXING = {"a": "the paper does not say; 0.1 is usual"}
LORA = "LoRA of rank 16, alpha 32, dropout 0.1"
SGD_DECAY, ADAMW_DECAY = {"weight_decay": 1e-3}, {"weight_decay": 0.01}
Method = tuple[type[Any], dict[str, Any], dict[str, str]]

# DP-FedAdamW, sections 7.1 and 9.4. Of the rivals in table 9 the paper gives only the names.
PRIVATE: dict[str, Method] = {
    "DP-FedAvg": (algorithms.FedAvg, SGD_DECAY, SGD_LR),
    "DP-SCAFFOLD": (algorithms.Scaffold, SGD_DECAY, SGD_LR),
    "DP-FedAvg-LS": (
        algorithms.FedAvgLS,
        SGD_DECAY,
        SGD_LR | {"sigma_ls": "the paper does not say; the papers on Laplacian smoothing take 0.5 to 1"},
    ),
    "DP-FedSAM": (algorithms.FedSAM, SGD_DECAY, SGD_LR | {"rho": SEARCHED + "0.01, 0.05, 0.1, 0.5"}),
    "DP-LocalAdamW": (algorithms.LocalAdamW, ADAMW_DECAY, ADAM_LR),
    "DP-FedAdamW": (algorithms.FedAdamW, ADAMW_DECAY | {"gamma": 0.5}, ADAM_LR),
}
RIVALS: dict[str, Method] = {
    "DP-FedOpt(Adam)": (algorithms.FedOpt, SGD_DECAY | {"server": "adam"}, SGD_LR | SERVER_LR),
    "DP-FAFED": (algorithms.FAFED, {}, ADAM_LR),
    "DP-FedLADA": (algorithms.FedLADA, {}, ADAM_LR | MIXING),
}
# FedAdamW, tables 1 to 3.
WITHOUT: dict[str, Method] = {
    "FedAvg": (algorithms.FedAvg, SGD_DECAY, SGD_LR),
    "SCAFFOLD": (algorithms.Scaffold, SGD_DECAY, SGD_LR),
    "FedCM": (algorithms.FedCM, SGD_DECAY, SGD_LR | MIXING),
    "Local Adam": (algorithms.LocalAdam, {}, PLAIN_LR | {"weight_decay": SEARCHED + "0.01, 0.001"}),
    "FedAdam": (algorithms.FedOpt, SGD_DECAY | {"server": "adam"}, SGD_LR | SERVER_LR),
    "FedLADA": (algorithms.FedLADA, {}, PLAIN_LR | MIXING),
    "Local AdamW": (algorithms.LocalAdamW, ADAMW_DECAY, PLAIN_LR),
    "FedAdamW": (algorithms.FedAdamW, ADAMW_DECAY | {"gamma": 0.5}, PLAIN_LR),
}
# DP-AdamW, appendix C. Its rows of the other three methods on pictures are those of Tang et al. 2023.
QUOTED = {"lr": "the paper quotes this row from Tang et al. 2023 and does not give its settings"}
TEXT = {
    "lr": SEARCHED + "1e-6 to 5e-3",
    "clip": SEARCHED + "0.05, 0.1, 0.2",
    "epsilon": "the paper has 1, 3 and 7",
    "delta": "the released code takes 1 / 3274, which is more than one record in the data weighs; 1e-6 is sound",
}
DECAY = {"weight_decay": SEARCHED + "0, 1e-5, 1e-4"}
BY_EPSILON = {"DP-AdamW": {1.0: 1.5e-3, 3.0: 1.5e-3, 7.0: 2e-3}, "DP-AdamW-BC": {1.0: 1e-4, 3.0: 2e-4, 7.0: 4e-4}}
CENTRAL: dict[str, type[Any]] = {
    "DP-SGD": algorithms.SGD,
    "DP-Adam": algorithms.Adam,
    "DP-AdamBC": algorithms.AdamBC,
    "DP-AdamW": algorithms.AdamW,
    "DP-AdamW-BC": algorithms.AdamWBC,
}


@cache
def entries() -> dict[tuple[str, str, str], Entry]:
    """All that is published, by method, data set and model, in small letters and digits."""
    found: dict[tuple[str, str, str], Entry] = {}

    def add(method: str, dataset: str, model: str, *entry: Any) -> None:
        found[plain(method), plain(dataset), plain(model)] = Entry((method, dataset, model), *entry)

    large = {"Tiny-ImageNet", "QQP", "MNLI"}
    for method, (kind, stated, silent) in (PRIVATE | RIVALS).items():
        noise = {"clip": 0.1, "sigma": 1.0}
        alphas = (0.6, 0.1) if method in PRIVATE else (0.1,)
        vision = Setting(50, alphas, 100, 20, 5, 16, f"DP-FedAdamW, table 15; {LORA}")
        for dataset in ("CIFAR-10", "CIFAR-100", "Tiny-ImageNet"):
            delta = {"delta": 1e-6 if dataset in large else 1e-5}
            if method in RIVALS:
                if dataset != "CIFAR-10":
                    add(method, dataset, "Swin-Base", kind, vision, stated | noise | delta, silent)
                continue
            for model in ("Swin-Tiny", "Swin-Base", *(["ViT-Base"] if dataset != "Tiny-ImageNet" else [])):
                add(method, dataset, model, kind, vision, stated | noise | delta, silent)
            if dataset != "Tiny-ImageNet":  # table 17 has the learning rates
                scratch = Setting(50, alphas, 300, 50, 10, 50, "DP-FedAdamW, tables 15 and 17; trained from scratch")
                lr = {"lr": 3e-4 if "AdamW" in method else 0.1}
                rest = {name: words for name, words in silent.items() if name != "lr"}
                add(method, dataset, "GN-ResNet-18", kind, scratch, stated | noise | delta | lr, rest)
        for dataset in ("SST-2", "QQP", "QNLI", "MNLI") if method in PRIVATE else ():
            text = Setting(4, (0.8,), 100, 20, 4, 16, f"DP-FedAdamW, table 16; {LORA}")
            delta = {"delta": 1e-6 if dataset in large else 1e-5}
            add(method, dataset, "RoBERTa-Base", kind, text, stated | noise | delta, silent)
    for method, entry in WITHOUT.items():
        for model in ("ResNet-18", "ViT-Tiny"):
            setting = Setting(100, (0.6, 0.1), 300, 50, 10, 50, "FedAdamW, table 1")
            add(method, "CIFAR-100", model, entry[0], setting, *entry[1:])
        for dataset in ("CIFAR-100", "Tiny-ImageNet"):
            setting = Setting(100, (0.1,), 100, 50, 5, 16, "FedAdamW, table 2")
            add(method, dataset, "Swin", entry[0], setting, *entry[1:])
        for dataset in ("CoLA", "RTE", "SST-2", "QQP", "MRPC", "QNLI", "MNLI"):
            setting = Setting(20, (0.8,), 100, 50, 4, 32, "FedAdamW, table 3; LoRA of rank 16")
            add(method, dataset, "RoBERTa-Base", entry[0], setting, *entry[1:])
    for method, kind in CENTRAL.items():  # 70 epochs of 50,000 records in batches of 1024; 10 of 104,743 in batches of 32
        pictures = Setting(1, (), 3418, 1, 1, 1024, "DP-AdamW, appendix C.1 and table 4; no schedule stated", "constant")
        text = Setting(1, (), 32732, 1, 1, 32, "DP-AdamW, appendix C.2; no schedule stated", "constant")
        stated: dict[str, Any] = {"floor": 5e-8} if method.endswith("BC") else {}
        decays = method.startswith("DP-AdamW")
        if decays:
            stated |= {"lr": BY_EPSILON[method], "weight_decay": 1e-5}
        silent = {} if decays else QUOTED | {"epsilon": TEXT["epsilon"]}
        add(method, "CIFAR-10", "CNN5", kind, pictures, stated | {"clip": 1.0, "delta": 1e-5}, silent)
        floor = {"floor": 1e-8} if method.endswith("BC") else {}
        add(method, "QNLI", "BERT-Base", kind, text, floor, TEXT | (DECAY if decays else {}))
    script = Setting(1, (), 0, 1, 1, 4096, "the run script of DP-MicroAdam, which gives no number of rounds", "constant")
    stated = {"lr": 1e-3, "clip": 1.0, "sigma": 4.0, "delta": 1e-5, "ef_bits": None}
    add("DP-MicroAdam", "CIFAR-10", "WRN-16-4", algorithms.MicroAdam, script, stated, {})
    return found
