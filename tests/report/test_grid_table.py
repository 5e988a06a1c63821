"""The results of a grid, against texts and numbers worked out by hand."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from fedsc.experiments.grids import Column, Grid, Row
from fedsc.report.grid_table import (
    Results,
    best_against_second,
    best_and_second,
    cost_tables,
    csv_page,
    latex_page,
    level_for_all,
    markdown_page,
    notes_of,
    only_most,
    percent_text,
    rounds_text,
    significance_table,
    three_digits,
)
from fedsc.report.results_table import results_file, results_tables
from fedsc.report.runs import RunData

SPEC = {
    "dataset": "digits",
    "partition": "nid1:0.2",
    "long_tail": None,
    "few_shot": None,
    "clients": 10,
    "participation": 1.0,
    "epochs": 5,
    "model": "mlp",
    "lr": 0.1,
}


def run(
    label: str, seed: int, accuracies: list[float], lr: float = 0.1, diverged: bool = False
) -> RunData:
    """2 MB and half a second a round; accuracies in percent."""
    records = [
        {
            "round": number,
            "accuracy": accuracy / 100,
            "bytes_up": 500_000,
            "bytes_down": 1_500_000,
            "timing": {"seconds": 0.5},
            **({"diverged": True} if diverged else {}),
        }
        for number, accuracy in enumerate(accuracies, 1)
    ]
    spec = {**SPEC, "label": label, "method": {"name": label}, "seed": seed, "lr": lr}
    return RunData(Path(label), spec, records, True)


GRID = Grid(
    name="table9",
    title="Table 9: accuracy in %",
    row_heading="method",
    rows=(
        Row("fedavg", "FedAvg", "fedavg"),
        Row("moon", "MOON", "moon"),
        Row("fedsc", "FedSC", "fedsc"),
    ),
    columns=(
        Column("c", "nid1", "CIFAR", "NID1", {}),
        Column("c", "r40", "CIFAR", "rounds\nto 40%", {}, rounds_to=0.4),
        Column("c", "nid2", "CIFAR", "NID2", {}),
        Column("c", "avg", "CIFAR", "mean", None),
    ),
    paper={
        ("fedavg", "c/nid1"): 50.0,
        ("fedsc", "c/nid1"): 61.5,
        ("fedavg", "c/r40"): 3,
        ("fedsc", "c/r40"): 2,
    },
)


@pytest.fixture
def results() -> Results:
    """FedAvg whole, FedSC without NID2 of seed 1, MOON not there at all."""
    runs = {}
    for seed, last in enumerate((50, 52)):
        found = run("fedavg", seed, [10, 30, last])
        runs["fedavg", "c/nid1", seed] = runs["fedavg", "c/r40", seed] = found
        runs["fedavg", "c/nid2", seed] = run("fedavg", seed, [last - 20])
    for seed, last in enumerate((60, 63)):
        found = run("fedsc", seed, [20, 40 + seed, last])
        runs["fedsc", "c/nid1", seed] = runs["fedsc", "c/r40", seed] = found
    runs["fedsc", "c/nid2", 0] = run("fedsc", 0, [20], diverged=True)
    return Results(GRID, [0, 1], runs, wanted=12, missing=5)


MARKDOWN = """## Table 9: accuracy in %

Mean ± standard deviation over 2 seeds; accuracy of the global model on the test set after the last round.

Missing: 5 of 12 runs ([2/3]: two of three seeds are there).

* has diverged.

### CIFAR

| method | NID1 ours | paper | diff. | rounds to 40% ours | paper | diff. | NID2 | mean |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| FedAvg | *51.00 ± 1.41* | 50.00 | +1.00 | *3.0 ± 0.0* | 3 | +0.0 | 31.00 ± 1.41 | 41.00 ± 1.41 |
| MOON | missing | - | - | missing | - | - | missing | missing |
| FedSC | **61.50 ± 2.12** | 61.50 | +0.00 | **2.0 ± 0.0** | 2 | +0.0 | 20.00 [1/2]\\* | 40.00 [1/2] |

### Best against second

| column | best | second | ahead by | p |
| --- | ---: | ---: | ---: | ---: |
| CIFAR, NID1 | FedSC | FedAvg | 10.50 | 0.030 |

p: two-sided paired t-test on the last accuracies of the seeds that both have.

### What an accuracy costs: CIFAR, NID1

| method | rounds to 20% | rounds to 40% | rounds to 60% | rounds to 80% | MB to 40% | seconds to 40% |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| FedAvg | 2.0 | 3.0 | never | never | 6.00 | 1.50 |
| MOON | missing | missing | missing | missing | missing | missing |
| FedSC | 1.0 | 2.0 | 3.0 | never | 4.00 | 1.00 |

### What an accuracy costs: CIFAR, NID2

| method | rounds to 20% | rounds to 40% | rounds to 60% | rounds to 80% | MB to 20% | seconds to 20% |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| FedAvg | 1.0 | never | never | never | 2.00 | 0.500 |
| MOON | missing | missing | missing | missing | missing | missing |
| FedSC | 1.0 [1/2] | never [1/2] | never [1/2] | never [1/2] | 2.00 [1/2] | 0.500 [1/2] |
"""  # noqa: E501


def test_markdown(results: Results) -> None:
    """p of NID1: differences 10 and 11, t = 10.5 / (0.7071 / sqrt 2) = 21 with one degree of
    freedom, p = 1 - 2 atan(21) / pi = 0.0303."""
    assert markdown_page(results) == MARKDOWN


def test_latex_has_the_same_cells(results: Results) -> None:
    text = latex_page(results)
    assert (
        r"FedSC & \textbf{61.50 $\pm$ 2.12} & 61.50 & $+0.00$ & \textbf{2.0 $\pm$ 0.0} & 2 & "
        r"$+0.0$ & 20.00 [1/2]* & 40.00 [1/2] \\"
    ) in text
    assert r"MOON & missing & - & - & missing & - & - & missing & missing \\" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 4
    assert r"\caption{Table 9: accuracy in \%. Best against second}" in text


def test_csv_leaves_empty_what_is_missing(results: Results) -> None:
    lines = {
        (line["row"], line["column"]): line
        for line in csv.DictReader(io.StringIO(csv_page(results)))
    }
    assert len(lines) == 12
    whole = lines["fedavg", "nid1"]
    assert (whole["mean"], whole["std"], whole["paper"]) == ("51.0", "1.414214", "50.0")
    assert (whole["difference"], whole["best"], whole["rounds_to_40"]) == ("1.0", "51.0", "3")
    assert (whole["seeds"], whole["seeds_missing"], whole["diverged"]) == ("2", "0", "0")
    assert (whole["cost_accuracy"], whole["megabytes_to"]) == ("40.0", "6.0")
    missing = lines["moon", "nid1"]
    assert missing["seeds_missing"] == "2"
    assert all(missing[name] == "" for name in ("mean", "std", "difference", "best", "seconds_to"))
    part = lines["fedsc", "nid2"]
    assert (part["mean"], part["std"], part["seeds_missing"]) == ("20.0", "", "1")
    assert part["diverged"] == "1"


def test_a_given_accuracy_takes_the_place_of_the_common_one(results: Results) -> None:
    table = cost_tables(results, 0.6)[0]
    assert [block.heading for block in table.blocks[-2:]] == ["MB\nto 60%", "seconds\nto 60%"]
    assert table.blocks[-2].rows == [("never",), ("missing",), ("6.00",)]


def test_the_highest_level_that_all_reach() -> None:
    assert level_for_all([run("a", 0, [10, 45]), run("b", 0, [65])]) == 0.4
    assert level_for_all([run("a", 0, [10])]) == 0.2  # none: the lowest, which says "never"


def test_texts_of_a_cell() -> None:
    assert percent_text([], 3) == "missing"
    assert percent_text([50.0], 1) == "50.00"
    assert percent_text([50.0, 52.0], 3) == "51.00 ± 1.41 [2/3]"
    assert rounds_text([], 1) == "missing"
    assert rounds_text([7], 1) == "7"
    assert rounds_text([None], 1) == "never"
    assert rounds_text([3, None, 5], 3) == "4.0 ± 1.4 (2/3)"
    assert rounds_text([None, None], 3) == "never [2/3]"


def test_three_digits() -> None:
    assert [three_digits(x) for x in (0.01234, 1.0, 12.34, 123.4, 1234.5)] == [
        "0.0123",
        "1.00",
        "12.3",
        "123",
        "1,234",
    ]


def test_ties_share_a_mark() -> None:
    assert best_and_second([1.0, 3.0, None, 3.0, 2.0]) == ["", "best", "", "best", "second"]
    assert best_and_second([1.0, 3.0, 2.0], lower_is_better=True) == ["best", "", "second"]
    assert best_and_second([1.0, None]) == ["", ""]


def test_words_instead_of_a_p_value() -> None:
    one = [run("a", 0, [60]), run("a", 1, [61])]
    other = [run("b", 0, [50]), run("b", 1, [51])]
    assert best_against_second({"a": one, "b": other}) == ("a", "b", "10.00", "no spread")
    assert best_against_second({"a": one[:1], "b": other[:1]}) == ("a", "b", "10.00", "one seed")
    assert best_against_second({"a": one[:1], "b": other[1:]}) is None  # no seed that both have
    assert best_against_second({"a": one, "b": []}) is None


def test_the_best_is_ahead_by_what_it_is_on_shared_seeds() -> None:
    """Seed 1 alone is shared: 64 - 50, where the means are 62 and 55."""
    best = [run("a", 0, [60]), run("a", 1, [64])]
    second = [run("b", 1, [50]), run("b", 2, [60])]
    lucky = [run("c", 1, [90])]
    cut = [run("d", 0, [10]), run("d", 1, [10])]
    assert best_against_second({"d": cut, "c": lucky, "b": second, "a": best}) == (
        "a",
        "b",
        "14.00",
        "one seed",
    )
    longer = [run("e", 0, [1, 20]), run("f", 0, [1, 10])]  # what came further is compared alone
    assert best_against_second({"a": best, "e": longer[:1], "f": longer[1:]}) == (
        "e",
        "f",
        "10.00",
        "one seed",
    )


def test_marks_go_to_rows_of_the_most_seeds() -> None:
    means = [90.0, 60.0, 50.0, None]
    assert best_and_second(only_most(means, [1, 3, 3, 9])) == ["", "best", "second", ""]
    assert best_and_second(only_most(means, [3, 1, 1, 0])) == ["", "", "", ""]


def test_one_column_needs_no_table_of_significance(results: Results) -> None:
    single = Results(GRID.select(["c/nid1"], None), [0, 1], results.runs, 6, 2)
    assert significance_table(single) is None
    page = markdown_page(single)
    assert (
        "Best against second: FedSC over FedAvg by 10.50 points, paired t-test p = 0.030." in page
    )


def test_notes_say_what_is_scaled(results: Results) -> None:
    scaled = Results(GRID.__class__(**{**GRID.__dict__, "scale": "small"}), [0], {}, 1, 1)
    notes = "\n".join(notes_of(scaled))
    assert "20 rounds of 5 epochs" in notes
    assert "of the paper's scale" in notes
    assert "One seed" in notes
    assert "Missing: 1 of 1 runs." in notes


# Any run folders ----------------------------------------------------------------------------------


def test_runs_are_grouped_by_setting_and_by_what_sets_them_apart() -> None:
    runs = [run("fedsc", seed, [80 + seed], lr) for lr in (0.1, 0.01) for seed in (0, 1)]
    other = run("fedavg", 0, [70])
    other = RunData(other.path, {**other.spec, "dataset": "cifar10"}, other.records, True)
    tables = results_tables([*runs, other])
    assert [table.title for table in tables] == [
        "digits, NID1 0.2, 10 clients, 5 epochs, mlp",
        "cifar10, NID1 0.2, 10 clients, 5 epochs, mlp",
    ]
    assert tables[0].row_names == ["fedsc, lr=0.1", "fedsc"]  # 0.01 is the default
    assert tables[0].blocks[0].rows == [("80.50 ± 0.71",), ("80.50 ± 0.71",)]
    assert tables[1].row_names == ["fedavg"]


def test_what_calibration_would_give_has_a_column_where_it_was_measured() -> None:
    plain = [run("fedavg", seed, [50]) for seed in (0, 1)] + [run("moon", 0, [60])]
    assert "calibrated" not in {block.heading for block in results_tables(plain)[0].blocks}
    assert "calibrated" not in results_file(plain, Path("x.csv"))
    measured = RunData(
        plain[0].path,
        {**plain[0].spec, "calibrated": True},
        [{**plain[0].records[0], "calibrated": 0.7, "summed": 0.8}],
        True,
    )
    runs = [measured, *plain[1:]]
    (table,) = results_tables(runs)
    assert table.row_names == ["fedavg", "moon"]  # measured or not, a seed is of the same row
    found = {block.heading: block.rows for block in table.blocks}
    assert found["calibrated"] == [("70.00 [1/2]",), ("-",)]
    assert found["summed"] == [("80.00 [1/2]",), ("-",)]
    assert "[2/3]: of two seeds, where a row has three." in table.notes
    assert "averaged" not in found
    assert any(note.startswith("Calibrated: ") for note in table.notes)
    lines = [*csv.DictReader(io.StringIO(results_file(runs, Path("x.csv"))))]
    assert [line["calibrated"] for line in lines] == ["70.0", ""]
    assert [line["summed"] for line in lines] == ["80.0", ""]
    assert [line["summed_seeds"] for line in lines] == ["1", "0"]
    assert [line["seeds"] for line in lines] == ["2", "1"]


def test_a_lucky_seed_is_not_the_best_of_any_runs() -> None:
    runs = [run("fedavg", seed, [50]) for seed in (0, 1)]
    runs += [run("moon", seed, [40]) for seed in (0, 1)] + [run("fedsc", 0, [90], diverged=True)]
    (table,) = results_tables(runs)
    assert table.row_names == ["fedavg", "moon", "fedsc (diverged)"]
    assert table.blocks[0].marks == ["best", "second", ""]
    assert any(note.startswith("Best against second: fedavg over moon") for note in table.notes)


def test_files_of_any_runs() -> None:
    runs = [run("fedavg", 0, [30, 50]), run("fedsc", 0, [40, 61])]
    assert "| fedsc | **61.00** | 61.00 | 1.0 | 1.0 | 2.0 | never | 2.00 |" in results_file(
        runs, Path("x.md")
    ).replace(" 0.500 |", "")
    assert r"fedsc & \textbf{61.00} & 61.00" in results_file(runs, Path("x.tex"))
    (_, line) = csv.DictReader(io.StringIO(results_file(runs, Path("x.csv"))))
    assert (line["method"], line["mean"], line["rounds_to_60"]) == ("fedsc", "61.0", "2")
    with pytest.raises(ValueError, match=r"'\.doc' is not one of \.md, \.tex, \.csv"):
        results_file(runs, Path("x.doc"))
