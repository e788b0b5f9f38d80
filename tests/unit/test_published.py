"""What the papers state, compared with the tables of the specification where they are at hand, and what they do not state."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dpfed import Gaussian, InputError, Plain, Task, algorithms, epsilon, iid
from dpfed.__main__ import main
from dpfed.published import Entry, entries, published
from dpfed.rounds import dry_round, planned_events

GIVEN = {"lr": 0.01, "rho": 0.05, "sigma_ls": 1.0, "server_lr": 0.1, "a": 0.1, "weight_decay": 0.0, "clip": 0.1, "delta": 1e-6}


def completed(entry: Entry) -> dict[str, Any]:
    """What has to be given beside what is stated."""
    given: dict[str, Any] = {name: (GIVEN | {"epsilon": 3.0})[name] for name in entry.silent}
    return given | ({"epsilon": 3.0} if any(isinstance(value, dict) for value in entry.stated.values()) else {})


@pytest.mark.parametrize("entry", entries().values(), ids=lambda entry: " ".join(entry.names))
def test_all_that_is_published_can_be_run(entry: Entry) -> None:
    given = completed(entry)
    found = published(*entry.names, **given)
    x = torch.zeros(entry.setting.num_clients * 4, 3)
    task = Task(torch.nn.Linear(3, 2), iid((x, torch.arange(len(x)) % 2), num_clients=entry.setting.num_clients))
    recipe = found.recipe(task, rounds=entry.setting.rounds or 1)
    assert recipe.name.startswith("DP-") == entry.names[0].startswith("DP-")
    assert isinstance(found.mechanism, Gaussian) == entry.names[0].startswith("DP-")
    assert set(found.yours) == set(entry.silent)
    dry_round(recipe.algorithm, recipe.local_steps)
    for name in entry.silent:
        with pytest.raises(InputError, match=rf"^{name}: .+ Give one\.$"):
            published(*entry.names, **{key: value for key, value in given.items() if key != name})


def test_every_algorithm_but_one_is_in_a_paper() -> None:
    kinds = {entry.algorithm.__name__ for entry in entries().values()}
    assert set(algorithms.__all__) - kinds == {"FedProx"}  # which users expect, and no paper here compares with


def test_as_in_the_paper_costs_what_it_costs() -> None:
    """CIFAR, 1,000 records a client, in all rounds: 4.79 by RDP. With SAM's two gradients 10.97, and not twice 4.79."""
    for method, given, cost in (("DP-FedAdamW", {}, 4.79), ("DP-FedSAM", {"rho": 0.05}, 10.97)):
        found = published(method, "CIFAR-100", "Swin-Base", lr=1e-3, **given)
        once = planned_events(found.mechanism, 1000, dry_round(found.algorithm, found.setting.local_steps))
        events = {event: count * found.setting.rounds for event, count in once.items()}
        assert epsilon(events, found.delta, "rdp") == pytest.approx(cost, abs=0.04)


def test_names_may_be_written_as_one_likes_and_settings_changed() -> None:
    found = published("dp fedavgls", "cifar10", "gn-resnet18", sigma_ls=0.5, sigma=2.0, clip=0.1)
    assert (found.algorithm.lr, found.algorithm.sigma_ls, found.mechanism.sigma) == (0.1, 0.5, 2.0)  # type: ignore[attr-defined]
    assert found.yours == ("sigma_ls", "sigma")
    found = published("DP-FedAdamW", "CIFAR-10", "Swin-Base", lr=1e-3, epsilon=2.0)
    assert (found.mechanism.sigma, found.mechanism.epsilon) == (None, 2.0)  # type: ignore[union-attr]
    assert published("DP-AdamW-BC", "CIFAR-10", "CNN5", epsilon=7.0).algorithm.lr == 4e-4  # type: ignore[attr-defined]
    assert isinstance(published("FedAdamW", "CIFAR-100", "ViT-Tiny", lr=3e-4).mechanism, Plain)


def test_what_no_paper_has_is_refused() -> None:
    with pytest.raises(InputError, match="no paper has DP-FedAdamW on MNIST with LeNet"):
        published("DP-FedAdamW", "MNIST", "LeNet")
    with pytest.raises(InputError, match="epsilon: the paper has 1, 3, 7; got 2"):
        published("DP-AdamW", "CIFAR-10", "CNN5", epsilon=2.0)
    with pytest.raises(InputError, match="momentum: FedAvg has no such setting"):
        published("DP-FedAvg", "CIFAR-10", "GN-ResNet-18", momentum=0.9)
    with pytest.raises(InputError, match=r"sigma_ls: .* 0\.5 to 1"):
        published("DP-FedAvg-LS", "CIFAR-10", "GN-ResNet-18")
    with pytest.raises(InputError, match="rounds: must be at least 1, got 0"):
        published("DP-MicroAdam", "CIFAR-10", "WRN-16-4").recipe(Task(torch.nn.Linear(1, 1), None))  # type: ignore[arg-type]


def test_the_command_says_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    main(["published", "dp-fedadamw", "cifar-100", "swin-base"])
    said = capsys.readouterr().out
    assert "50 clients, Dirichlet 0.6 or 0.1; 5 in a round, 100 rounds of 20 steps" in said
    assert "lr: the paper says only where it searched" in said
    with pytest.raises(SystemExit):
        main(["published", "nothing"])


SHARED = Path(os.environ.get("DPFED_SHARED", Path(__file__).parents[3] / "shared"))
CONFIGS = SHARED / "spec" / "paper_configs.json"


@pytest.mark.skipif(not CONFIGS.is_file(), reason="the specification is not at hand")
def test_the_numbers_are_those_of_the_specification() -> None:
    configs, compared = json.loads(CONFIGS.read_text()), 0
    for config in configs:
        datasets = config.get("dataset", "").split(", ")
        if config["kind"] == "fed_config":
            glue = ["CoLA", "RTE", "SST-2", "QQP", "MRPC", "QNLI", "MNLI"]
            models = [m.removesuffix(" (pretrained)").removesuffix(" LoRA") for m in config["model"].split(", ")]
            places = [(d, m) for d in (glue if datasets == ["GLUE x7"] else datasets) for m in models]
            method, given = ("DP-FedAdamW", {"sigma"}) if config["seed"] == "001" else ("FedAdamW", set())
            for place in places:
                found = published(method, *place, **({} if place[1] == "GN-ResNet-18" else {"lr": 1e-3}))
                s = found.setting
                assert (s.num_clients, s.rounds, s.local_steps) == (config["N"], config["T"], config["K"])
                assert (s.cohort, s.batch_size) == (round(config["l"] * config["N"]), config["batch"])
                if given:
                    assert (found.mechanism.sigma, found.delta) == (config["sigma"], config["delta"])
                if "dirichlet" in config:
                    dirichlet = config["dirichlet"]
                    assert list(s.alphas) == (dirichlet if isinstance(dirichlet, list) else [dirichlet])
                compared += 1
        if config.get("table") == "T17":
            given = {"rho": 0.05} if "SAM" in config["method"] else {"sigma_ls": 1.0} if "LS" in config["method"] else {}
            algorithm: Any = published(config["method"], "CIFAR-10", "GN-ResNet-18", **given).algorithm
            assert (algorithm.lr, algorithm.weight_decay) == (config["lr"], config["weight_decay"])
            if config["beta1"]:
                assert (algorithm.beta1, algorithm.beta2) == (config["beta1"], config["beta2"])
            compared += 1
    for row in json.loads((SHARED / "spec" / "paper_tables.json").read_text()):
        if (row["seed"], row["table"], row["metric"]) == ("002", "T4", "learning_rate"):
            budget = float(row["epsilon_or_sigma"].removeprefix("epsilon="))
            central: Any = published(row["method"], row["dataset"], row["model"], epsilon=budget).algorithm
            assert central.lr == row["value"]
            compared += 1
    assert compared == 14 + 11 + 6 + 6
