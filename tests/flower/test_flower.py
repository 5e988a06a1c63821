"""Federations on Flower equal those in one process, and bad nodes do not spoil them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from safetensors.torch import load_file
from torch import Tensor

import fedsc
from fedsc import METHODS, FedscError, RunSpec
from fedsc.federation import split_training_data
from fedsc.flower.config import app_pyproject, read_run_config
from fedsc.flower.memory import NodeMemory
from fedsc.options import options_of
from fedsc.report.runs import read_run

from .in_process import InProcessGrid, partitions, run_in_process

REPOSITORY = Path(__file__).parents[2]
QUICK: dict[str, Any] = {
    "rounds": 3,
    "epochs": 1,
    "lr": 0.05,
    "clients": 4,
    "train-limit": 300,
    "threads": 1,
    "device": "cpu",
    "min-count": 1,
    "start-timeout": 0.1,
}


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSC_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def in_one_process(out: Path, method: str, **config: Any) -> Path:
    """The same run by the sequential engine."""
    options = {name.replace("-", "_"): v for name, v in {**QUICK, **config}.items()}
    for name in ("min_count", "start_timeout", "min_replies", "round_timeout", "method"):
        options.pop(name, None)
    dataset = options.pop("dataset", "digits")
    fedsc.run(dataset, method, out=out, engine="sequential", **options)
    return out


def assert_same_run(flower: Path, sequential: Path, rtol: float = 1e-6) -> None:
    """Weights and the server's whole state to `rtol`, and equal records but for the clock."""
    ours, theirs = (load_file(run / "state.safetensors") for run in (flower, sequential))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=rtol, atol=rtol)
    for mine, other in zip(read_run(flower).records, read_run(sequential).records, strict=True):
        assert mine["accuracy"] == other["accuracy"]
        assert mine["cohort"] == other["cohort"]
        assert mine["bytes_up"] == other["bytes_up"]
        assert mine["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)


def run_nodes(out: Path, method: str = "fedavg", nodes: Any = None, **config: Any) -> Path:
    """One run on Flower; returns its run folder."""
    settings = {**QUICK, "method": method, "out": str(out), **config}
    run_in_process(settings, nodes or partitions(settings["clients"]))
    (folder,) = out.iterdir()
    return folder


# The same numbers ---------------------------------------------------------------------------------


def test_every_method_gives_the_sequential_engines_weights(tmp_path: Path) -> None:
    config = {**QUICK, "method": "; ".join(METHODS), "out": str(tmp_path / "flower")}
    run_in_process(config, partitions(4))
    folders = {
        json.loads((f / "spec.json").read_text())["method"]["name"]: f
        for f in (tmp_path / "flower").iterdir()
    }
    assert folders.keys() == METHODS.keys()
    for name, folder in folders.items():
        assert_same_run(folder, in_one_process(tmp_path / name, name))


def test_a_mistake_in_a_method_of_ones_own_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the node that finds it, and the server passes it on."""
    file = tmp_path / "mine.py"
    lines = [
        "import fedsc",
        "class Mine(fedsc.FedAvg):",
        "    name = 'mine'",
        "    def upload(self, result):",
        "        return {'norm': 3.5}",
    ]
    file.write_text("\n".join(lines))
    with pytest.raises(FedscError, match="0 of 4 nodes sent what can be used"):
        run_nodes(tmp_path / "flower", f"{file}:Mine")
    said = capsys.readouterr().err
    assert "client 0 is left out: mine: upload gives 'norm' as a float, 3.5 (allowed: ten" in said


@pytest.mark.parametrize("method", ["moon", "fedcda", "fedsc,pool=bank,init_protos=true"])
def test_part_of_the_clients_in_each_round(tmp_path: Path, method: str) -> None:
    folder = run_nodes(tmp_path / "flower", method, participation=0.5)
    assert_same_run(folder, in_one_process(tmp_path / "seq", method, participation=0.5))


def test_a_convolutional_network_with_batch_norm(tmp_path: Path) -> None:
    """BatchNorm's counter is a whole number and comes back as one."""
    config = {"model": "cnn", "clients": 2, "train-limit": 60, "rounds": 2}
    folder = run_nodes(tmp_path / "flower", "fedsc", **config)
    assert_same_run(folder, in_one_process(tmp_path / "seq", "fedsc", **config), rtol=1e-3)
    state = load_file(folder / "state.safetensors")
    counters = [t for name, t in state.items() if name.endswith("num_batches_tracked")]
    assert counters
    assert all(counter.dtype == torch.int64 and counter > 0 for counter in counters)


def test_nodes_with_their_own_images_give_what_a_shared_data_set_gives(tmp_path: Path) -> None:
    """Each node has a file with the images that the partition would deal to it."""
    digits = fedsc.load_dataset("digits")
    spec = RunSpec(clients=4, train_limit=300)
    nodes = []
    for k, part in enumerate(split_training_data(spec, digits)):
        path = tmp_path / f"hospital-{k}.npz"
        x, y = digits.train_images[part, 0].numpy(), digits.train_labels[part].numpy()
        np.savez(path, x=x, y=y)
        nodes.append({"partition-id": k, "data": f"npz:{path}"})
    folder = run_nodes(tmp_path / "flower", "fedsc", nodes, partition="own")
    shared = in_one_process(tmp_path / "seq", "fedsc")
    ours, theirs = (load_file(run / "state.safetensors") for run in (folder, shared))
    for name, tensor in ours.items():  # there is no drift of prototypes yet: NaN
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True)
    records = read_run(folder).records
    assert [r["accuracy"] for r in records] == [r["accuracy"] for r in read_run(shared).records]
    assert "client_worst" not in records[-1]  # the server does not know who holds what


# What travels -------------------------------------------------------------------------------------

EXTRA = {
    "fedavg": set(),
    "fedprox": set(),
    "moon": set(),
    "fedntd": set(),
    "fedrcl": set(),
    "fedcda": {"loss"},
    "fedproto": {"prototypes", "counts"},
    "fednh": {"sums", "counts"},
    "fedsc": {"prototypes", "counts"},
    "fedsc+": {"prototypes", "counts", "class_sums", "class_counts", "products"},
}


def uploads_of(config: dict[str, Any], number: int) -> dict[int, RecordDict]:
    """What each node sends in one round."""
    grid = InProcessGrid(config, partitions(number))
    sent: dict[int, RecordDict] = {}

    def watch(asked: Message, reply: Message, partition: int) -> Message:
        if asked.metadata.message_type == "train":
            sent[partition] = reply.content
        return reply

    grid.tamper = watch
    fedsc.flower.server.run_server(grid, config)
    return sent


@pytest.mark.parametrize("method", list(METHODS))
def test_a_node_sends_its_weights_what_its_method_needs_and_nothing_else(
    method: str, tmp_path: Path
) -> None:
    config = {**QUICK, "method": method, "rounds": 1, "clients": 2, "train-limit": 40}
    for content in uploads_of({**config, "out": str(tmp_path)}, 2).values():
        assert set(content) == {"model", "extra", "facts", "losses", "measures"}
        assert set(content.array_records["extra"]) == EXTRA[method]
        assert set(content.metric_records["facts"]) == {"partition-id", "num-samples"}
        assert set(content.metric_records["measures"]) <= {"min_u"}
        assert all(isinstance(v, float) for v in content.metric_records["losses"].values())


@pytest.mark.parametrize("method", ["fedsc", "fedproto", "fednh"])
def test_a_class_with_few_images_sends_no_prototype(method: str, tmp_path: Path) -> None:
    """The mean of one record is that record: below five nothing is sent, unless told otherwise."""
    config = {**QUICK, "method": method, "rounds": 1, "out": str(tmp_path / "a")}
    del config["min-count"]
    few = many = 0
    digits = fedsc.load_dataset("digits")
    parts = split_training_data(RunSpec(clients=4, train_limit=300), digits)
    for k, content in uploads_of(config, 4).items():
        held = torch.bincount(digits.train_labels[parts[k]], minlength=10)
        vectors = next(t for n, t in torch_state(content, "extra").items() if n != "counts")
        for label in range(10):
            there = bool(vectors[label].any())
            assert there == (held[label] >= 5)
            few += int(0 < held[label] < 5)
            many += there
    assert few  # the partition has such classes
    assert many


def torch_state(content: RecordDict, name: str) -> dict[str, Tensor]:
    return dict(content.array_records[name].to_torch_state_dict())


def test_bytes_on_the_wire_are_weights_prototypes_and_counts(tmp_path: Path) -> None:
    """Framing, names and numbers add less than 5%, both ways."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 28, 28), np.uint8), np.arange(40) % 10
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    out = tmp_path / "out"
    config = {**QUICK, "dataset": f"npz:{tmp_path / 'd.npz'}", "model": "cnn", "rounds": 2}
    config |= {"clients": 2, "method": "fedsc", "train-limit": "", "partition": "iid"}
    grid = run_in_process({**config, "out": str(out)}, partitions(2))
    records = read_run(next(out.iterdir())).records
    for sent, counted in (
        (grid.bytes_up, sum(record["bytes_up"] for record in records)),
        (grid.bytes_down, sum(record["bytes_down"] for record in records)),
    ):
        assert counted < sent < 1.05 * counted


# Bad nodes ----------------------------------------------------------------------------------------


def change_model(change: Callable[[dict[str, Tensor]], None]) -> Callable[[RecordDict], None]:
    def apply(content: RecordDict) -> None:
        state = torch_state(content, "model")
        change(state)
        content["model"] = ArrayRecord(state)

    return apply


def set_nan(state: dict[str, Tensor]) -> None:
    state["classifier.weight"][3, 5] = float("nan")


def one_class_more(state: dict[str, Tensor]) -> None:
    state["classifier.weight"] = torch.cat([state["classifier.weight"]] * 2)[:11]


def drop_a_tensor(state: dict[str, Tensor]) -> None:
    del state["classifier.bias"]


def as_float64(state: dict[str, Tensor]) -> None:
    state["classifier.bias"] = state["classifier.bias"].double()


def two_dimensions_less(content: RecordDict) -> None:
    state = torch_state(content, "extra")
    content["extra"] = ArrayRecord({**state, "counts": state["counts"][:8]})


def another_partition(content: RecordDict) -> None:
    content["facts"] = MetricRecord({"partition-id": 2, "num-samples": 10})


def no_samples(content: RecordDict) -> None:
    content["facts"] = MetricRecord({"partition-id": 1, "num-samples": 0})


def nothing_at_all(content: RecordDict) -> None:
    for name in list(content):
        del content[name]


def not_an_array(content: RecordDict) -> None:
    record = content.array_records["model"]
    record["classifier.bias"] = Array("float32", (10,), "numpy.ndarray", b"no array at all")


BAD = {
    "classifier.weight holds NaN": change_model(set_nan),
    r"has shape \(11, 64\), not \(10, 64\)": change_model(one_class_more),
    "other tensors than it should: classifier.bias": change_model(drop_a_tensor),
    "is torch.float64, not torch.float32": change_model(as_float64),
    r"counts has shape \(8,\), not \(10,\)": two_dimensions_less,
    "says it is partition 2, not 1": another_partition,
    "num-samples = 0": no_samples,
    "it sent no": nothing_at_all,
    "cannot be read": not_an_array,
}


@pytest.fixture(scope="module")
def without_node_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation in which that node was never there."""
    nodes = [{"partition-id": k} for k in (0, 2)]
    out = tmp_path_factory.mktemp("without")
    return run_nodes(out, "fedsc", nodes, clients=3, rounds=1)


def spoil_node_1(out: Path, spoil: Callable[[Message, Message], Message | None]) -> Path:
    config = {**QUICK, "method": "fedsc", "clients": 3, "rounds": 1, "out": str(out)}
    config["round-timeout"] = 0.3
    grid = InProcessGrid(config, partitions(3))

    def tamper(asked: Message, reply: Message, partition: int) -> Message | None:
        trains = asked.metadata.message_type == "train"
        return spoil(asked, reply) if trains and partition == 1 else reply

    grid.tamper = tamper
    fedsc.flower.server.run_server(grid, config)
    return next(out.iterdir())


@pytest.mark.parametrize("reason", list(BAD))
def test_what_cannot_be_used_is_left_out(
    reason: str, tmp_path: Path, without_node_1: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(asked: Message, reply: Message) -> Message:
        BAD[reason](reply.content)
        return reply

    folder = spoil_node_1(tmp_path, spoil)
    assert re.search(f"round 1: client 1 is left out: .*{reason}", capsys.readouterr().err)
    assert read_run(folder).records[0]["left_out"] == [1]
    ours, theirs = (load_file(f / "state.safetensors") for f in (folder, without_node_1))
    for name, tensor in ours.items():  # there is no drift of prototypes yet: NaN
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda asked, reply: None, "no reply within 0.3 s"),
        (lambda asked, reply: Message(Error(8, "out of\nmemory"), reply_to=asked), "out of memory"),
    ],
)
def test_a_node_that_dies_is_left_out(
    spoil: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = spoil_node_1(tmp_path, spoil)
    assert f"client 1 is left out: {reason}" in capsys.readouterr().err
    assert read_run(folder).records[0]["left_out"] == [1]


class LosingGrid(InProcessGrid):
    """Some messages of the second round are not taken; how that is said is Flower's 1.41."""

    lost: set[int] | None = None  # partitions; None: all, as of a request that is too large

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids: list[Any] = list(super().push_messages(messages))
        for place, message in enumerate(messages):
            partition = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
            if message.metadata.group_id != "2":
                continue
            if self.lost is None:
                self.replies.clear()
                return []
            if partition in self.lost:
                del self.replies[ids[place]]
                ids[place] = None
        return ids


@pytest.mark.parametrize("lost", [{1}, None])
def test_a_message_that_is_not_sent_is_not_waited_for(
    lost: set[int] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**QUICK, "method": "fedavg", "clients": 3, "rounds": 2, "out": str(tmp_path)}
    config["round-timeout"] = 15.0
    grid = LosingGrid(config, partitions(3))
    grid.lost = lost
    began = time.monotonic()
    if lost is None:
        with pytest.raises(FedscError, match="round 2: 0 of 3 nodes sent what can be used"):
            fedsc.flower.server.run_server(grid, config)
    else:
        fedsc.flower.server.run_server(grid, config)
        assert read_run(tmp_path / "fedavg-seed0").records[1]["left_out"] == [1]
    assert time.monotonic() - began < 15
    said = capsys.readouterr().err
    for client in lost or {0, 1, 2}:
        assert f"round 2: client {client} is left out: its message could not be sent" in said


def test_too_few_replies_stop_the_run_and_resume_goes_on(tmp_path: Path) -> None:
    """MOON remembers: its nodes come back as new processes, with nothing but their files."""
    config = {**QUICK, "method": "moon", "out": str(tmp_path / "flower"), "min-replies": 0.75}
    grid = InProcessGrid(config, partitions(4))
    trained: list[int] = []

    def two_break_down_in_round_3(asked: Message, reply: Message, partition: int) -> Message | None:
        broken = asked.metadata.group_id == "3" and partition > 1
        trained.append(int(asked.metadata.group_id or 0))
        return Message(Error(8, "power cut"), reply_to=asked) if broken else reply

    grid.tamper = two_break_down_in_round_3
    with pytest.raises(FedscError, match=r"round 3: 2 of 4 nodes .* 3 are needed .*resume = true"):
        fedsc.flower.server.run_server(grid, config)
    folder = tmp_path / "flower" / "moon-seed0"
    assert len(read_run(folder).records) == 2
    assert not read_run(folder).complete
    assert trained.count(3) == 4  # their memories are of round 3 already, which comes again

    run_in_process({**config, "resume": True}, partitions(4))
    assert_same_run(folder, in_one_process(tmp_path / "seq", "moon"))


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    folder = run_nodes(tmp_path / "a", rounds=1)
    with pytest.raises(FedscError, match="exists already"):
        run_nodes(tmp_path / "a", rounds=1)
    before = (folder / "metrics.jsonl").read_bytes()
    run_nodes(tmp_path / "a", rounds=1, resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == before
    run_nodes(tmp_path / "a", rounds=1, overwrite=True)
    assert (folder / "metrics.jsonl").read_bytes() != before  # it took another time


WORK_IN = """
import sys, pathlib
from fedsc.experiments.folder import RunFolder
with RunFolder(pathlib.Path(sys.argv[1])).alone():
    print("here", flush=True)
    sys.stdin.read()
"""


def test_nobody_else_may_work_in_a_run_that_goes_on(tmp_path: Path) -> None:
    """Not after the first round either."""
    config = {**QUICK, "method": "fedavg", "clients": 2, "rounds": 2, "out": str(tmp_path)}
    folder = tmp_path / "fedavg-seed0"
    grid = InProcessGrid(config, partitions(2))
    said: list[str] = []

    def try_as_well(asked: Message, reply: Message, partition: int) -> Message:
        if asked.metadata.group_id == "2" and partition == 0:
            other = [sys.executable, "-c", WORK_IN, str(folder)]
            done = subprocess.run(other, capture_output=True, text=True, input="")
            said.append(done.stdout + done.stderr)
        return reply

    grid.tamper = try_as_well
    fedsc.flower.server.run_server(grid, config)
    assert len(said) == 1
    assert f"another process works in {folder}" in said[0]


def test_a_run_that_goes_on_is_not_overwritten(tmp_path: Path) -> None:
    folder = run_nodes(tmp_path, rounds=1, clients=2)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with subprocess.Popen(
        [sys.executable, "-c", WORK_IN, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        with pytest.raises(FedscError, match=f"another process works in {folder}"):
            run_nodes(tmp_path, rounds=1, clients=2, overwrite=True)
        other.communicate()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_run_that_began_on_one_machine_goes_on_with_nodes(tmp_path: Path) -> None:
    """What was known of its environment stays."""
    folder = in_one_process(tmp_path / "flower" / "fedavg-seed0", "fedavg")
    whole = in_one_process(tmp_path / "whole", "fedavg")
    (folder / "summary.json").unlink()
    (folder / "state.safetensors").unlink()  # after its third round, its only one
    began = json.loads((folder / "environment.json").read_text())
    assert run_nodes(tmp_path / "flower", resume=True) == folder
    assert_same_run(folder, whole)
    now = json.loads((folder / "environment.json").read_text())
    assert now.pop("flower").keys() == {"flwr", "run"}
    assert now == began


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({}, "partition-id = None"),
        ({"partition-id": 3}, r"partition-id = 3 .* \(allowed: 0 to 2\)"),
        ({"partition-id": 0}, "partition 0 is taken"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(
    node: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [{"partition-id": 0}, {"partition-id": 1}, node]
    run_nodes(tmp_path, nodes=nodes, clients=3, rounds=1)
    err = capsys.readouterr().err
    assert re.search(f"cannot take part: .*{reason}", err)
    assert "client 2 is left out: its node is not connected" in err


def test_a_refused_node_takes_part_when_the_reason_has_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stands in for a node that is dead and still counts as connected, until round 3."""
    config = {**QUICK, "method": "fedavg", "clients": 2, "rounds": 4, "out": str(tmp_path)}
    config["round-timeout"] = 0.3
    grid = InProcessGrid(config, [{"partition-id": 0}, {"partition-id": 1}, {"partition-id": 0}])
    trained: dict[int, list[str | None]] = {}

    def die(asked: Message, reply: Message, partition: int) -> Message | None:
        if asked.metadata.message_type != "train" or partition != 0:
            return reply
        node = asked.metadata.dst_node_id
        trained.setdefault(node, []).append(asked.metadata.group_id)
        if asked.metadata.group_id != "2":
            return reply
        grid.gone.add(node)
        return None

    grid.tamper = die
    fedsc.flower.server.run_server(grid, config)
    (dead, first), (other, then) = trained.items()
    assert dead != other
    assert (first, then) == (["1", "2"], ["3", "4"])
    records = read_run(tmp_path / "fedavg-seed0").records
    assert [record.get("left_out") for record in records] == [None, [0], None, None]
    said = capsys.readouterr().err
    assert said.count(f"node {other} cannot take part: partition 0 is taken") == 1


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": np.zeros((9, 8, 8), np.uint8), "y": np.arange(9) + 2}, "labels from 2 to 10"),
        ({"x": np.zeros((9, 9, 9), np.uint8), "y": np.arange(9)}, r"\(1, 9, 9\).*\(1, 8, 8\)"),
        ({"x": np.zeros((9, 8, 8), np.uint8)}, "must hold x_train and y_train, or x and y"),
    ],
)
def test_images_that_do_not_fit_are_named(
    arrays: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.npz", tmp_path / "bad.npz"
    np.savez(good, x=np.zeros((9, 8, 8), np.uint8), y=np.arange(9))
    np.savez(bad, **arrays)
    nodes = [{"partition-id": k, "data": f"npz:{path}"} for k, path in enumerate((good, bad))]
    run_nodes(tmp_path / "out", nodes=nodes, clients=2, rounds=1, partition="own")
    assert re.search(f"cannot take part: .*{reason}", capsys.readouterr().err)


# What a node remembers ----------------------------------------------------------------------------


def test_the_last_memory_before_the_round_is_recalled(tmp_path: Path) -> None:
    def memory(state: RecordDict | None = None, run: str = "a") -> NodeMemory:
        return NodeMemory(state or RecordDict(), tmp_path, run, 7)

    state = RecordDict()
    for round in (1, 3, 4):
        memory(state).keep(round, {"model": {"w": torch.tensor([float(round)])}})
    assert len(list((tmp_path / "a").iterdir())) == 2  # of the last two rounds
    for found in (memory(state), memory()):  # of the same process, or only the files
        assert float(found.recall(9)["model"]["w"]) == 4  # type: ignore[index]
        assert float(found.recall(4)["model"]["w"]) == 3  # type: ignore[index]
    assert memory(state, "b").recall(9) is None  # another training


# The configuration --------------------------------------------------------------------------------


def test_the_app_folder_has_every_option_with_its_default() -> None:
    written = (REPOSITORY / "apps" / "fedsc-flower" / "pyproject.toml").read_text()
    assert written == app_pyproject("0.1.0"), "run: fedsc flower app apps/fedsc-flower"
    import tomllib

    config = tomllib.loads(written)["tool"]["flwr"]["app"]["config"]
    assert {opt.name.replace("_", "-") for opt in options_of(RunSpec)} <= config.keys()
    options, (job,) = read_run_config(config)
    assert options.min_count == 5
    assert job.spec == RunSpec(method="fedsc,min_count=5", engine="sequential")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"round": 3}, "unknown option in the run configuration 'round': did you mean 'rounds'"),
        ({"rounds": 0}, "rounds = 0 is out of range"),
        ({"engine": "graphs"}, "on Flower take sequential"),
        ({"engine": "workers"}, "on Flower take sequential"),
        ({"dp-unit": "record", "dp-clip": 1.0}, "dp-unit = record is for simulations"),
        ({"dropout": 0.5}, "dropout = 0.5 is for simulations"),
        ({"calibrated": True}, "calibrated = True is for simulations"),
        ({"method": "fedproto,evaluation=ensemble"}, "stay on the nodes"),
        ({"method": "fedsk"}, "did you mean 'fedsc'"),
        ({"method": "fedsc; fedsc"}, "asked for twice"),
        ({"seed": "0; x"}, "seed = 'x' is not a whole number"),
        ({"min-replies": 0}, "min_replies = 0 is out of range"),
    ],
)
def test_a_wrong_option_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(FedscError, match=re.escape(message)):
        read_run_config(config)


def test_the_method_may_set_its_own_min_count() -> None:
    _, jobs = read_run_config({"method": "fedavg; fedsc,min_count=2; fednh", "seed": "0; 1"})
    assert [(job.spec.method, job.spec.seed) for job in jobs] == [
        *(("fedavg", 0), ("fedavg", 1)),
        *(("fedsc,min_count=2", 0), ("fedsc,min_count=2", 1)),
        *(("fednh,min_count=5", 0), ("fednh,min_count=5", 1)),
    ]


def test_without_flower_one_line_says_how_to_install_it() -> None:
    program = "import sys; sys.modules['flwr'] = None; from fedsc.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "flower", "setup", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "fedsc: Flower is not installed; run: pip install 'fedsc[flower]'\n"
