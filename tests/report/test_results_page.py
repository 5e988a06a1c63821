"""Tables within a page of prose: each kind of block, against figures worked out by hand."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsc.cli import main
from fedsc.errors import FedscError
from fedsc.report.results_page import block, fill_page, filled, paper_number
from fedsc.report.results_table import method_of
from fedsc.report.runs import read_run
from tests.report.made_runs import write_run

ROOT = Path(__file__).parents[2]
PAPER: dict[str, Any] = {
    "dataset": "cifar10",
    "clients": 10,
    "epochs": 10,
    "model": "resnet10",
    "augment": "crop-flip",
    "lr": 0.01,
    "rounds": 100,
}


@pytest.mark.parametrize("name", ["README.md", "docs/results.md", "docs/results-fashion-mnist.md"])
def test_the_page_says_what_the_folders_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / name).read_text()
    assert filled(page) == page, f"{name} is older than results/: call `make results`"


def test_every_run_is_on_a_page() -> None:
    """Nothing is measured and then left out."""
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("results*.md"))
    for folder in (ROOT / "results").iterdir():
        assert re.search(rf"<!-- commands:[^>]*\bresults/{re.escape(folder.name)}\s", pages), folder


# The kinds of blocks ------------------------------------------------------------------------------


def ending_in(last: float) -> list[float]:
    """100 rounds at 70%, then 80%, and a last one of this accuracy in %."""
    return [0.7] * 95 + [0.8] * 4 + [last / 100]


def test_comparison(tmp_path: Path) -> None:
    for seed, (fedavg, fedcda) in enumerate([(84, 86), (85, 87.5), (86, 88)]):
        accuracies = ending_in(fedavg)
        accuracies[49] = 0.9
        write_run(tmp_path / f"a{seed}", "fedavg", seed, accuracies, **PAPER)
        write_run(tmp_path / f"b{seed}", "fedcda", seed, ending_in(fedcda), **PAPER)
    write_run(tmp_path / "c", "moon", 1, ending_in(84.5), **PAPER)
    cut = [0.75] * 40
    write_run(tmp_path / "d", "fedavg,logit_adjustment=1", 0, cut, complete=False, **PAPER)
    (tmp_path / "c" / "environment.json").write_text('{"device": "NVIDIA H200"}')
    # fedcda is ahead by 2, 2.5 and 2: t = (13/6) / (sqrt(1/12) / sqrt(3)) = 13 with 2 degrees of
    # freedom, and p = 1 - 13 / sqrt(2 + 13²) = 0.0059.
    assert block("comparison", [str(tmp_path)]).splitlines() == [
        "| method | seeds | rounds | last | mean of last 5 | best | paper | over FedAvg | p "
        "| images/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| fedavg | 3 | 100 | *85.00 ± 1.00* | 81.00 ± 0.20 | 90.00 | 84.65 | - | - | 12,346 |",
        r"| fedavg,logit\_adjustment=1 | 1 | 40 of 100 | 75.00 | 75.00 | 75.00 | - | - | - "
        "| 12,346 |",
        "| moon | 1 | 100 | 84.50 | 80.90 | 84.50 | 86.10 | -0.50 | - | 12,346 |",
        "| fedcda | 3 | 100 | **87.17 ± 1.04** | 81.43 ± 0.21 | 87.17 | 87.11 | +2.17 | 0.006 "
        "| 12,346 |",
        "",
        "cifar10, NID1 0.2, 10 clients, 10 epochs, resnet10. Accuracy in % on the test set. "
        "Images/s of training, on NVIDIA H200.",
    ]


def test_what_calibration_would_give(tmp_path: Path) -> None:
    """Of fedavg two of three seeds have it; fedsc+ is tested with one of them, unless it is off."""
    for seed, calibrated in enumerate([0.80, 0.82, None]):
        asked = calibrated is not None
        measured = {"calibrated": calibrated, "summed": 0.7} if asked else {}
        path = tmp_path / f"a{seed}"
        write_run(path, "fedavg", seed, [0.5, 0.6], measured=measured, calibrated=asked)
    write_run(tmp_path / "b", "moon", 0, [0.5, 0.7])
    for folder, text, options in (
        ("c", "fedsc+", {"calibration": True, "averaged_weight": 1.0}),
        ("d", "fedsc+,averaged_weight=0", {"calibration": True, "averaged_weight": 0.0}),
        ("e", "fedsc+,averaged_weight=2", {"calibration": True, "averaged_weight": 2.0}),
        ("f", "fedsc+,calibration=false", {"calibration": False, "averaged_weight": 1.0}),
    ):
        method = {"name": "fedsc+", **options}
        write_run(tmp_path / folder, text, 0, [0.5, 0.9], method=method)
    text = block("comparison", [str(tmp_path)])
    rows = [line.split(" | ") for line in text.splitlines()]
    assert [(row[0], row[6], row[7]) for row in rows[:8]] == [
        ("| method", "calibrated", "summed"),
        ("| ---", "---:", "---:"),
        ("| fedavg", "81.00 ± 1.41 [2/3]", "70.00 ± 0.00 [2/3]"),
        ("| moon", "-", "-"),
        ("| fedsc+", "-", "90.00"),
        (r"| fedsc+,averaged\_weight=0", "90.00", "-"),
        (r"| fedsc+,averaged\_weight=2", "-", "-"),
        ("| fedsc+,calibration=false", "-", "-"),
    ]
    assert "calibrated" not in block("comparison", [str(tmp_path / name) for name in "bc"])


def test_other_classifiers_have_columns(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", 0, [0.5, 0.6], measured={"summed": 0.7})
    measured = {"summed": 0.8, "averaged": 0.65}
    write_run(tmp_path / "b", "fedsc+", 0, [0.5, 0.75], measured=measured)
    lines = block("comparison", [str(tmp_path)]).splitlines()
    cells = {line.split("|")[1].strip(): line.split("|") for line in lines if "|" in line}
    summed, averaged = (
        [name.strip() for name in cells["method"]].index(name) for name in ("summed", "averaged")
    )
    assert cells["fedavg"][summed].strip() == "70.00"
    assert cells["fedavg"][averaged].strip() == "-"
    assert cells["fedsc+"][summed].strip() == "80.00"
    assert cells["fedsc+"][averaged].strip() == "65.00"


@pytest.mark.parametrize("name", ["calibrated", "summed", "averaged"])
def test_a_share_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", 0, [0.5], measured={name: "most of them"})
    with pytest.raises(FedscError, match=name):
        read_run(tmp_path / "a")


def test_a_reading_with_another_norm_is_compared_with_fedavg_of_that_norm(tmp_path: Path) -> None:
    for name, accuracy in (("fedavg", 0.6), ("fedsc", 0.7)):
        write_run(tmp_path / name, name, 0, [accuracy])
        write_run(tmp_path / f"{name}-group", name, 0, [accuracy - 0.2], norm="group")
    write_run(tmp_path / "moon-none", "moon", 0, [0.9], norm="none")
    rows = [line.split(" | ") for line in block("comparison", [str(tmp_path)]).splitlines()]
    assert [(row[0], row[6]) for row in rows[2:7]] == [
        ("| fedavg", "-"),
        ("| fedavg, norm=group", "-"),
        ("| moon, norm=none", "-"),
        ("| fedsc", "+10.00"),
        ("| fedsc, norm=group", "+10.00"),
    ]


def test_search(tmp_path: Path) -> None:
    steady = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.71, 0.73, 0.74, 0.76, 0.77]
    swinging = [0.5, 0.6, 0.5, 0.6, 0.55, 0.6, 0.5]
    common: dict[str, Any] = {"validation": 5000, "rounds": 12, "norm": "group"}
    write_run(tmp_path / "x-seed0", "fedsc,neighbours=7", 0, steady, drift=True, **common)
    write_run(tmp_path / "y-seed0", "fedsc,neighbours=8", 0, swinging, complete=False, **common)
    # Swings: (4 · 10 + 1 + 2 + 1 + 2 + 1) / 9 and (3 · 10 + 2 · 5 + 10) / 6 points.
    assert block("search", [str(tmp_path)]).splitlines() == [
        "| reading | rounds | after 5 | after 10 | mean of last 5 | nearest prototype | swing |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| fedsc,neighbours=7 | 12 | *50.00* | 74.00 | 74.20 | 74.20 | 5.22 |",
        "| fedsc,neighbours=8 | 7 of 12 | **55.00** | - | 55.00 | - | 8.33 |",
        "",
        "digits, NID1 0.2, 4 clients, 2 epochs, mlp, norm=group, lr=0.05. "
        "Accuracy in % on 5,000 training images held out.",
    ]


def test_search_over_seeds_and_settings(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"x-seed{seed}", "fedsc", seed, [0.5 + seed / 10] * 5)
    write_run(tmp_path / "y-seed0", "fedsc", 0, [0.3], partition="nid2")
    lines = block("search", [str(tmp_path)]).splitlines()
    assert lines[2] == "| fedsc | 2 | 5 | 55.00 | 55.00 ± 7.07 | 0.00 |"
    assert "| fedsc | 1 | 30.00 | - |" in lines
    assert sum("NID2" in line for line in lines) == 1


def test_rows_of_fewer_seeds_are_not_marked_and_what_few_seeds_have_is(tmp_path: Path) -> None:
    """Of fedsc one seed is also FedAvg's; moon has the best accuracy, of one seed."""
    for seed, accuracy in ((0, 0.5), (1, 0.6)):
        write_run(tmp_path / f"a{seed}", "fedavg", seed, [accuracy] * 5)
    write_run(tmp_path / "b1", "fedsc", 1, [0.7] * 5, drift=True)
    write_run(tmp_path / "b2", "fedsc", 2, [0.9] * 5)
    write_run(tmp_path / "c3", "moon", 3, [0.95] * 5)
    rows = [line.split(" | ") for line in block("comparison", [str(tmp_path)]).splitlines()]
    assert [(row[0], row[3], row[6]) for row in rows[2:5]] == [
        ("| fedavg", "*55.00 ± 7.07*", "-"),
        ("| moon", "95.00", "-"),
        ("| fedsc", "**80.00 ± 14.14**", "+10.00 [1/2]"),
    ]
    rows = [line.split(" | ") for line in block("search", [str(tmp_path)]).splitlines()]
    assert [(row[0], row[3], row[5]) for row in rows[2:5]] == [
        ("| fedavg", "*55.00*", "-"),
        ("| moon", "95.00", "-"),
        ("| fedsc", "**80.00**", "70.00 [1/2]"),
    ]


def test_seeds_one_by_one(tmp_path: Path) -> None:
    for seed, last in ((0, 84), (2, 88)):
        write_run(tmp_path / f"a{seed}", "fedavg", seed, ending_in(last), **PAPER)
    write_run(tmp_path / "b0", "fedsc,tau=0.1", 0, ending_in(83), **PAPER)
    write_run(tmp_path / "b2", "fedsc,tau=0.1", 2, [0.9] * 40, complete=False, **PAPER)
    # (4 · 80 + 84) / 5 and so on; what was cut short is left out.
    assert block("seeds", [str(tmp_path)]).splitlines() == [
        "| method | seed 0 | seed 2 | paper |",
        "| --- | ---: | ---: | ---: |",
        "| fedavg | **80.80** | 81.60 | 84.65 |",
        "| fedsc,tau=0.1 | *80.60* | - | 88.13 |",
        "",
        "cifar10, NID1 0.2, 10 clients, 10 epochs, resnet10. Accuracy in % on the test set. "
        "Mean of the last five rounds.",
    ]


def test_speed(tmp_path: Path) -> None:
    """The paper's Table 3 has 5, 18 and 55 rounds for FedAvg and none for 60%; FedProto is not in
    it."""
    for seed, up_to_80 in ((0, 10), (1, 13)):
        accuracies = [0.2, 0.39, *[0.5] * (up_to_80 - 3), 0.8, *[0.5] * (100 - up_to_80)]
        write_run(tmp_path / f"a{seed}", "fedavg", seed, accuracies, **PAPER)
    write_run(tmp_path / "b0", "fedproto", 0, [0.45] * 100, **PAPER)
    write_run(tmp_path / "b1", "fedproto", 1, [0.1, 0.65] * 50, **PAPER)
    write_run(tmp_path / "c0", "moon", 0, [0.3, 0.9], complete=False, **PAPER | {"rounds": 100})
    assert block("speed", [str(tmp_path)]).splitlines() == [
        "| method | seeds | rounds | to 20% | paper | to 40% | paper | to 60% | to 80% | paper |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| fedavg | 2 | 100 | 1.0 ± 0.0 | 5 | 3.0 ± 0.0 | 18 | 11.5 ± 2.1 | 11.5 ± 2.1 | 55 |",
        "| moon | 1 | 2 of 100 | 1 | 3 | 2 | 10 | 2 | 2 | 47 |",
        "| fedproto | 2 | 100 | 1.5 ± 0.7 | - | 1.5 ± 0.7 | - | 2.0 (1/2) | never | - |",
        "",
        "cifar10, NID1 0.2, 10 clients, 10 epochs, resnet10. Accuracy in % on the test set. "
        "Rounds until it is reached for the first time; never: not in the rounds of the run.",
    ]
    assert "paper" not in block("speed", [str(write_run(tmp_path / "d", "fedavg", 0, [0.9]))])


def test_fairness(tmp_path: Path) -> None:
    """Of the last five rounds; rare classes where the data have a long tail. Another classifier's
    accuracy is not that of these clients and classes."""
    thirds = {"head": 0.9, "middle": 0.5, "tail": 0.1}
    for seed, accuracy in ((0, 0.5), (1, 0.6)):
        measured = {"client_worst": accuracy - 0.2, "ece": 0.05}
        write_run(tmp_path / f"a{seed}", "fedavg", seed, [0.1, *[accuracy] * 5], measured=measured)
    measured = {**thirds, "summed": 0.7, "client_worst": 0.2, "ece": 0.3}
    tailed = write_run(tmp_path / "b", "fedsc", 0, [0.4], measured=measured, long_tail=10)
    lines = block("fairness", [str(tmp_path)]).splitlines()
    assert [line for line in lines if line.startswith("| ") and "---" not in line] == [
        "| method | seeds | rounds | accuracy | worst client | ECE |",
        "| fedavg | 2 | 6 | 55.00 ± 7.07 | 35.00 ± 7.07 | 5.00 ± 0.00 |",
        "| method | seeds | rounds | accuracy | worst client | ECE | head | middle | tail |",
        "| fedsc | 1 | 1 | 40.00 | 20.00 | 30.00 | 90.00 | 50.00 | 10.00 |",
    ]
    lines = block("fairness", [str(tailed)], "summed").splitlines()
    assert lines[0] == "| method | seeds | rounds | accuracy |"


def test_by_another_classifier(tmp_path: Path) -> None:
    """In every round, and of the runs only that were measured by it."""
    write_run(tmp_path / "a", "fedavg", 0, [0.5, 0.6], measured={"summed": 0.7})
    write_run(tmp_path / "b", "fedavg", 1, [0.5, 0.6])
    write_run(tmp_path / "c", "fedsc", 0, [0.5, 0.6], drift=True, measured={"summed": 0.8})
    options = {"name": "fedsc+", "calibration": True, "averaged_weight": 1.0}
    write_run(tmp_path / "d", "fedsc+", 0, [0.5, 0.75], method=options)
    lines = block("search", [str(tmp_path)], "summed").splitlines()
    assert [line for line in lines if "| fed" in line] == [
        "| fedavg | 2 | 70.00 | 0.00 |",
        "| fedsc | 2 | 80.00 | 0.00 |",
        "| fedsc+ | 2 | 62.50 | 25.00 |",
    ]
    assert lines[-1].endswith(
        "Accuracy in % on the test set, by the sum of a linear discriminant and the averaged "
        "classifier, like fedsc+."
    )
    assert "paper" not in block("seeds", [str(tmp_path)], "summed")  # which has another classifier
    page = f"<!-- search by summed: {tmp_path} -->\n<!-- end -->\n"
    assert "| fedsc | 2 | 80.00 | 0.00 |" in filled(page)
    with pytest.raises(FedscError, match=r"no run was measured .* make them with --calibrated"):
        block("search", [str(tmp_path / "b")], "summed")
    with pytest.raises(FedscError, match="unknown classifier 'sumed': did you mean 'summed'"):
        block("search", [str(tmp_path)], "sumed")


def test_a_printed_command_repeats_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def fedsc(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["fedsc", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code

    options = "--seed 3 --seed 4 --partition nid2 --rounds 2 --epochs 1 --train-limit 120 --quiet "
    options += "--calibrated"
    methods = "--method fedsc,literal,cpdr_weight=0.25,robust_prototypes=true --method fedavg"
    fedsc("run", *methods.split(), *options.split(), "--out", "results/odd's")
    Path("results/odd's/job.json").unlink()
    text = block("commands", ["results"])
    names = "fedavg", "fedsc_literal_cpdr_weight=0.25_robust_prototypes=true"
    folders = [f"results/odd's/{name}-seed{seed}" for name in names for seed in (3, 4)]
    first, second, *command = text.split("```")[1].strip().splitlines()
    assert [first, second] == [f"# results/odd's/{name}-seed{{3,4}}" for name in names]
    words = shlex.split("\n".join(command).replace("\\\n", " "))
    assert "--clients" not in words  # six are usual for nid2
    out = Path(words[words.index("--out") + 1])
    fedsc(*words[1:], "--quiet")
    for folder in map(Path, folders):
        old, new = read_run(folder), read_run(out / folder.name)
        assert new.spec == old.spec
        for mine, theirs in zip(new.records, old.records, strict=True):
            assert {**mine, "timing": 0} == {**theirs, "timing": 0}


def test_commands_of_cut_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec: dict[str, Any] = {**PAPER, "precision": "bf16", "validation": 5000}
    write_run(Path("search/seven-seed0"), "fedsc,neighbours=7", 0, [0.5] * 3, **spec)
    write_run(Path("search/other"), "fedsc,neighbours=7", 1, [0.5] * 100, **spec)
    assert block("commands", ["search"]).splitlines() == [
        "<details><summary>Run folders and the commands that repeat them</summary>",
        "",
        "```",
        "# search/other",
        "fedsc run --dataset cifar10 --seed 1 --validation 5000 --model resnet10 "
        "--augment crop-flip \\",
        "    --precision bf16 --method fedsc,neighbours=7 --out runs/search-1",
        "",
        "# search/seven-seed0, cut after round 3 of 100",
        "fedsc run --dataset cifar10 --seed 0 --validation 5000 --model resnet10 "
        "--augment crop-flip \\",
        "    --precision bf16 --method fedsc,neighbours=7 --out runs/search-2",
        "```",
        "",
        "</details>",
    ]


# What a run is called, and what the paper says of it ----------------------------------------------


@pytest.mark.parametrize(
    ("label", "recorded", "name"),
    [
        (
            "fedproto",
            {"weight": 0.5, "robust_prototypes": True},
            "fedproto,weight=0.5,robust_prototypes=true",
        ),  # were the default then
        ("fedproto,weight=1", {}, "fedproto"),
        (
            "fedproto,robust_prototypes=true,weight=2.0",
            {},
            "fedproto,weight=2,robust_prototypes=true",
        ),
        ("fedproto,private", {}, "fedproto,private"),
        ("fedproto,private", {"proto_source": "last_epoch"}, "fedproto"),
        ("fedproto,weight=1", {"an_option_that_has_gone": 1}, "fedproto,weight=1"),
        ("no/such/file.py:Mine,x=1", {}, "no/such/file.py:Mine,x=1"),
    ],
)
def test_a_method_is_named_by_what_is_not_default_today(
    tmp_path: Path, label: str, recorded: dict[str, Any], name: str
) -> None:
    run = write_run(tmp_path / "x", label, 0, [0.5], method={"name": "fedproto", **recorded})
    assert method_of(read_run(run)) == name


def test_moon_has_another_default_on_cifar100(tmp_path: Path) -> None:
    for mu, name in ((1.0, "moon"), (5.0, "moon,mu=5")):
        spec: dict[str, Any] = {"dataset": "cifar100", "method": {"name": "moon", "mu": mu}}
        assert method_of(read_run(write_run(tmp_path / name, "moon", 0, [0.5], **spec))) == name


def test_an_older_run_without_a_new_option_is_no_other_run(tmp_path: Path) -> None:
    write_run(tmp_path / "old", "fedsc", 0, [0.5])
    write_run(tmp_path / "new", "fedsc", 1, [0.5], dropout=0.0, min_clients=0)
    assert "| fedsc | 2 | 1 | 50.00 ± 0.00 |" in block("comparison", [str(tmp_path)])


BOTH_LOSSES = "fedsc,rpcl_weight=1,cpdr_weight=1"
LONG_TAIL = {"partition": "nid1:0.2", "long_tail": 100.0}


@pytest.mark.parametrize(
    ("label", "spec", "number"),
    [
        (BOTH_LOSSES, {}, 88.13),
        (f"{BOTH_LOSSES},tau=0.5,cpdr=l2", {}, 88.13),
        ("fedsc,rpcl_weight=1,cpdr_weight=0", {}, 86.79),  # Table 4
        ("fedsc,rpcl_weight=0,cpdr_weight=1", {}, 85.20),
        ("fedsc,rpcl_weight=1,cpdr_weight=0", {"dataset": "cifar100"}, None),
        ("fedsc,rpcl_weight=0,cpdr_weight=0", {}, None),
        ("fedavg", {"partition": "nid2", "clients": 6}, 75.60),
        ("fedavg", {"partition": "nid2", "clients": 10}, None),
        (BOTH_LOSSES, LONG_TAIL, 56.34),
        ("fedavg", {"dataset": "tinyimagenet", "model": "mobilenetv2"}, 42.84),
        ("fedavg", {"dataset": "tinyimagenet"}, None),
        ("fedavg,logit_adjustment=1", {}, None),
        ("fedavg", {"validation": 5000}, None),
        ("fedavg", {"norm": "group"}, None),
        ("fedavg", {"epochs": 5}, None),
        ("fedavg", {"precision": "bf16", "engine": "graphs", "slots": 4}, 84.65),
    ],
)
def test_the_paper_number_stands_beside_runs_of_its_setting_only(
    tmp_path: Path, label: str, spec: dict[str, Any], number: float | None
) -> None:
    run = read_run(write_run(tmp_path / "x", label, 0, [0.5], **{**PAPER, **spec}))
    assert paper_number(run) == number


# The page -----------------------------------------------------------------------------------------


def test_prose_stays_and_blocks_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"), "fedavg", 0, [0.5])
    page = Path("page.md")
    page.write_text("# A\n\n<!-- a remark -->\n<!-- search: runs -->\nold\n<!-- end -->\nB\n")
    assert fill_page(page) == "page.md is filled anew"
    first, rest = page.read_text().split("<!-- search: runs -->\n\n")
    assert first == "# A\n\n<!-- a remark -->\n"
    assert rest.startswith("| reading | rounds | mean of last 5 | swing |\n")
    assert rest.endswith("\n\n<!-- end -->\nB\n")
    assert fill_page(page) == "page.md is up to date"
    Path("plain.md").write_text("# Nothing marked\n")
    with pytest.raises(FedscError, match=r"plain\.md has no block to fill"):
        fill_page(Path("plain.md"))
    write_run(Path("runs/b"), "fedsc", 0, [0.5])
    fill_page(page)
    assert "| fedsc | 1 | 50.00 | - |" in page.read_text()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("<!-- search: nowhere -->\n<!-- end -->", "line 4: nowhere is not there; put its runs"),
        ("<!-- search: runs gap -->\n<!-- end -->", "line 4: gap holds no run folder; "),
        ("<!-- search: bad -->\n<!-- end -->", "line 4: bad/x/spec.json is damaged: "),
        ("<!-- search: -->\n<!-- end -->", "line 4: the block names no folder; write <!-- search"),
        ("<!-- serch: runs -->\n<!-- end -->", "unknown kind of block 'serch': did you mean"),
        ("<!-- search: runs -->\nand no end", "line 4: the block is not closed; write <!-- end"),
        (
            "<!-- search: runs -->\n<!-- search: runs -->\n<!-- end -->",
            "line 4: the block is not closed",
        ),
        ("<!-- end -->", "line 4: <!-- end --> closes nothing"),
        ("<!-- search: runs twin -->\n<!-- end -->", "runs/a and twin/a are the same run"),
    ],
)
def test_a_page_with_a_mistake_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "twin"):
        write_run(Path(folder, "a"), "fedavg", 0, [0.5])
    Path("gap").mkdir()
    Path("bad/x").mkdir(parents=True)
    Path("bad/x/spec.json").write_text("{")
    Path("bad/x/metrics.jsonl").write_text("")
    page = Path("page.md")
    good = "<!-- commands: runs -->\nold\n<!-- end -->\n"
    page.write_text(good + lines)
    with pytest.raises(FedscError) as error:
        fill_page(page)
    assert str(error.value).startswith("page.md, line ")
    assert says in str(error.value)
    assert page.read_text() == good + lines
    assert [path.name for path in Path().glob("page*")] == ["page.md"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fill", "nowhere.md"], "cannot read nowhere.md: "),
        (["--fill", "page.md", "runs"], "--fill stands alone"),
        ([], "give folders with runs, or a page to --fill"),
    ],
)
def test_the_command_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedsc", "results", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"fedsc: {says}")
