"""The paper's tables and figures as data."""

from __future__ import annotations

import pytest

from fedsc import FedscError
from fedsc.data.subset import long_tail_counts
from fedsc.experiments.cells import cells_of
from fedsc.experiments.grids import GRIDS, SCALES, SMOKE_RHO, grid
from fedsc.methods import FedSC


@pytest.mark.parametrize(
    ("name", "row", "column", "printed"),
    [  # read off the paper by eye
        ("table1", "fedsc", "cifar10/nid2", 79.61),
        ("table1", "fednh", "fc100/nid1_0.05", 48.54),
        ("table1", "moon", "tinyimagenet/nid1_0.2", 44.03),
        ("table2", "fedcda", "cifar100_lt/rho_200", 33.62),
        ("table2", "fedavg", "tinyimagenet_lt/rho_10", 28.80),
        ("table3", "fedprox", "cifar10/rounds_to_40", 15),
        ("table3", "fedsc", "cifar100/rounds_to_60", 53),
        ("table3", "fedrcl", "cifar100/acc", 62.36),
        ("table4", "fedavg", "cifar10/avg", 81.15),
        ("table4", "rpcl", "cifar10/nid1_0.5", 88.63),
        ("table4", "cpdr", "cifar10_lt/rho_100", 54.39),
        ("table4", "rpcl+cpdr", "cifar10/avg", 84.87),
        ("table5", "kl", "cifar10/nid1_0.2", 87.89),
    ],
)
def test_the_papers_numbers(name: str, row: str, column: str, printed: float) -> None:
    assert grid(name, "paper").paper[row, column] == printed


@pytest.mark.parametrize("name", [name for name in GRIDS if name.startswith("table")])
def test_every_cell_of_a_table_has_the_papers_number(name: str) -> None:
    found = grid(name, "smoke")
    cells = {(row.name, column.key) for row in found.rows for column in found.columns}
    assert cells == set(found.paper)


def test_the_number_of_runs() -> None:
    runs = {name: len({c.name for c in cells_of(grid(name, "paper"), [0])}) for name in GRIDS}
    assert runs == {
        "table1": 9 * 12,
        "table2": 9 * 12,
        "table3": 8 * 2,
        "table4": 4 * 8,
        "table5": 5,
        "figure1": 2,
        "figure5": 7 + 6 - 1,  # tau = 0.05 and M = 2 are one run
        "figure6": 2 * (4 + 4 - 1),  # and so are K = 10 and E = 10
        "figure7": 2 * 4,
    }


def test_grids_share_runs() -> None:
    names = {name: {cell.name for cell in cells_of(grid(name, "paper"), [0])} for name in GRIDS}
    assert names["table3"] < names["table1"]
    assert names["figure1"] < names["table1"]
    assert names["figure7"] < names["table1"] | names["table2"]
    assert len(names["table5"] & names["table1"]) == 1  # the angle-wise distance is the default
    assert len(names["figure5"] & names["table1"]) == 1
    assert len(names["figure6"] & names["table1"]) == 2


def test_the_settings_of_the_paper() -> None:
    cells = {
        (cell.row.name, cell.column.key): cell
        for name in ("table1", "table2", "table4", "figure6")
        for cell in cells_of(grid(name, "paper"), [0])
    }
    spec = cells["fedsc", "cifar10/nid1_0.05"].spec
    assert (spec.dataset, spec.partition, spec.num_clients) == ("cifar10", "nid1:0.05", 10)
    assert (spec.rounds, spec.epochs, spec.batch_size, spec.lr) == (100, 10, 64, 0.01)
    assert (spec.momentum, spec.weight_decay, spec.train_limit) == (0.9, 1e-5, None)
    assert cells["fedavg", "cifar100/nid2"].spec.num_clients == 6
    tail = cells["fedavg", "tinyimagenet_lt/rho_50"].spec
    assert (tail.dataset, tail.partition, tail.long_tail) == ("tinyimagenet", "nid1:0.2", 50)
    assert cells["fedavg", "clients/100"].spec.num_clients == 100
    assert cells["fedsc", "epochs/20"].spec.epochs == 20
    ablation = {row: cells[row, "cifar10/nid2"].method for row in ("rpcl", "cpdr", "rpcl+cpdr")}
    assert ablation == {
        "rpcl": FedSC(cpdr_weight=0.0),
        "cpdr": FedSC(rpcl_weight=0.0),
        "rpcl+cpdr": FedSC(),
    }


@pytest.mark.parametrize("name", GRIDS)
def test_a_smoke_cell_needs_no_files_and_a_small_one_real_data(name: str) -> None:
    smoke = [cell.spec for cell in cells_of(grid(name, "smoke"), [0])]
    small = [cell.spec for cell in cells_of(grid(name, "small"), [0])]
    paper = [cell.spec for cell in cells_of(grid(name, "paper"), [0])]
    assert {spec.dataset for spec in smoke} == {"digits"}
    assert [spec.dataset for spec in small] == [spec.dataset for spec in paper]
    assert [spec.partition for spec in smoke] == [spec.partition for spec in paper]


def test_long_tails_of_digits_leave_no_class_empty() -> None:
    for rho in SMOKE_RHO.values():
        assert min(long_tail_counts(147, 10, rho)) >= 7


def test_columns_by_group_and_one_by_one() -> None:
    table = grid("table1", "smoke")
    some = table.select(["cifar10", "fc100/nid2"], ["fedsc", "fedavg"])
    assert [c.name for c in some.columns] == ["nid1_0.05", "nid1_0.2", "nid2", "nid2"]
    assert [row.name for row in some.rows] == ["fedavg", "fedsc"]


def test_a_mean_is_kept_only_with_all_that_it_is_the_mean_of() -> None:
    table = grid("table4", "smoke")
    assert "avg" in [c.name for c in table.select(["cifar10"], None).columns]
    some = table.select(["cifar10/nid2", "cifar10/avg"], None)
    assert [c.name for c in some.columns] == ["nid2"]
    one_by_one = [c.key for c in table.columns if c.group == "cifar10" and c.name != "avg"]
    assert [c.name for c in table.select(one_by_one, None).columns][-1] == "avg"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(FedscError, match=r"did you mean .table\d.\? .*figure7, all"):
        grid("table", "smoke")
    with pytest.raises(FedscError, match=", ".join(SCALES)):
        grid("table1", "tiny")
    with pytest.raises(FedscError, match="cifar10/nid2"):
        grid("table1", "smoke").select(["mnist"], None)
    with pytest.raises(FedscError, match="fedavg, fedprox"):
        grid("table1", "smoke").select(None, ["fedsk"])
