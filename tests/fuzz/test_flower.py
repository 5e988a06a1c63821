"""Flower records that nodes, servers and files make up: used, or refused in words."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from fedsc.errors import FedscError
from fedsc.experiments.runner import build
from fedsc.faults import find_unusable
from fedsc.federation import Federation, mean_losses
from fedsc.flower.config import NodeOptions, read_run_config
from fedsc.flower.memory import NodeMemory
from fedsc.flower.records import (
    Facts,
    expected_extra,
    problem_in,
    read_client,
    read_state_like,
    read_task,
    read_upload,
    write_task,
    write_upload,
)
from fedsc.method import Upload
from fedsc.methods import method_from_text
from fedsc.options import options_of
from fedsc.spec import RunSpec
from fedsc.state import flatten, num_bytes

from .inputs import damaged, fuzzed, nothing_outside, read_or_refuse
from .runs import spec_of, tiny_data

TEXTS = st.sampled_from(
    (
        *("", "x", "../x", "/tmp/x", "a/b", "a/b/c", "..", "\x1b[2J", "\0", "x" * 5000, "none"),
        *("fedavg", "fedsc; moon", "a.py:X", "own", "0; 1", "nan", "9" * 5000, "fedsc,tau=x"),
    )
) | st.text(max_size=8)
INTEGERS = st.sampled_from((0, 1, -1, 2, 99, 2**31, 2**53, 2**63 - 1, -(2**63)))
FLOATS = st.floats(width=64) | st.sampled_from((0.5, 1e308, -0.0))
ONE = TEXTS | INTEGERS | FLOATS | st.booleans() | st.binary(max_size=8)
LISTS = st.lists(TEXTS, max_size=3) | st.lists(INTEGERS, max_size=3) | st.lists(FLOATS, max_size=3)
NUMBERS = INTEGERS | FLOATS | st.lists(INTEGERS, max_size=3) | st.lists(FLOATS, max_size=3)

FACTS = Facts(0, "0123456789abcdef", "hash", ("a", "b"), (1, 4, 4), (0.5,), (0.2,), "none")


@st.composite
def changed(draw: st.DrawFn, valid: dict[str, Any], values: st.SearchStrategy[Any]) -> Any:
    """A flat record with one to three of its entries replaced, removed, renamed or added."""
    record = dict(valid)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(record)) if record else TEXTS)
        action = draw(st.sampled_from(("replace", "replace", "remove", "rename", "add")))
        if action == "add":
            record[draw(TEXTS)] = draw(values)
            continue
        was = record.pop(name, None)
        if action == "replace":
            record[name] = draw(values)
        elif action == "rename" and was is not None:
            record[draw(TEXTS)] = was
    return record


@fuzzed
@given(task=changed(dict(write_task(3, FACTS)), ONE | LISTS))
def test_task(tmp_path_factory: Any, task: dict[str, Any]) -> None:
    """What a server asks for; nodes name a folder by its `run`."""
    found = read_or_refuse(lambda: read_task(RecordDict({"task": ConfigRecord(task)})))
    if found is not None:
        hash(found[1])
        folder = tmp_path_factory.getbasetemp() / "state"
        memory = NodeMemory(RecordDict(), folder, found[1].run, 0)
        assert memory.folder.resolve().parent == folder.resolve()


def test_a_task_cannot_lead_elsewhere() -> None:
    for run in ("../../x", "/etc", "..", "", "a/b", "x" * 65):
        task = write_task(1, dataclasses.replace(FACTS, run=run))
        with pytest.raises(FedscError, match="'run' is"):
            read_task(RecordDict({"task": task}))
        with pytest.raises(FedscError, match="cannot be called"):
            NodeMemory(RecordDict(), Path("x"), run, 0)


# States -------------------------------------------------------------------------------------------


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@st.composite
def arrays(draw: st.DrawFn, valid: Array | None = None) -> Array:
    """An array of Flower: a valid one damaged, or another altogether."""
    content = npy(np.zeros((2, 3), np.float32)) if valid is None else valid.data
    kind = draw(st.sampled_from(("bytes", "array", "labels")))
    if kind == "bytes":
        return Array("float32", (2, 3), "numpy.ndarray", draw(damaged(content)))
    if kind == "labels":
        shape = tuple(draw(st.lists(INTEGERS, max_size=3)))
        return Array(draw(TEXTS), shape, draw(TEXTS), content)
    dtype = draw(
        st.sampled_from(("f4", ">f4", "f8", "c8", "i8", "u8", "U3", "M8[s]", "f4,i2", "?"))
    )
    shape = draw(st.sampled_from(((), (0,), (2,), (1, 1), (2, 0, 3), (10, 64))))
    fill = draw(st.sampled_from((0, 1, 255)))
    array = np.full(shape, fill, "u1").astype(dtype) if dtype != "f4,i2" else np.zeros(shape, dtype)
    if dtype in ("f4", "f8") and draw(st.booleans()):
        array = np.full(shape, draw(st.sampled_from((np.nan, np.inf, 1e30))), dtype)
    return Array("float32", shape, "numpy.ndarray", npy(array))


@st.composite
def changed_arrays(draw: st.DrawFn, valid: ArrayRecord) -> ArrayRecord:
    record = dict(valid)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(record)) if record else TEXTS)
        action = draw(st.sampled_from(("replace", "replace", "remove", "add")))
        if action == "add":
            record[draw(TEXTS | st.just(f"{name}/x"))] = draw(arrays())
        elif action == "remove":
            record.pop(name, None)
        else:
            record[name] = draw(arrays(record.get(name)))
    return ArrayRecord(record)


@pytest.fixture(scope="module")
def federation() -> Federation:
    built, _ = build(spec_of("fedsc"), tiny_data(), method_from_text("fedsc"))
    return built


@pytest.fixture(scope="module")
def uploads(federation: Federation) -> list[Upload]:
    return [upload for upload, _ in federation.train(1, [0, 1])]


@fuzzed
@given(data=st.data())
def test_states_from_the_server(federation: Federation, data: st.DataObject) -> None:
    model = federation.server["model"]
    sent = data.draw(changed_arrays(ArrayRecord(flatten(model))))
    content = RecordDict({"model": sent})
    found = read_or_refuse(lambda: read_state_like(content, "model", model))
    assert found is None or num_bytes(found) >= num_bytes(model)
    read_or_refuse(lambda: read_state_like(content, "message", {}))


@fuzzed
@given(data=st.data(), known=st.booleans())
def test_uploads_of_nodes(
    federation: Federation, uploads: list[Upload], data: st.DataObject, known: bool
) -> None:
    """One node's reply is changed; the round goes on with it or without it."""
    model, method = federation.server["model"], federation.method
    good, other = uploads
    content = write_upload(other)
    for name in data.draw(st.lists(st.sampled_from(sorted(content)), min_size=1, max_size=2)):
        if data.draw(st.integers(0, 9)) == 0:
            content.pop(name, None)
        elif name in content.array_records:
            content[name] = data.draw(changed_arrays(content.array_records[name]))
        elif name in content.metric_records:
            numbers = dict(content.metric_records[name])
            content[name] = MetricRecord(data.draw(changed(numbers, NUMBERS)))
    message = method.broadcast(federation.server)
    due = expected_extra(method, federation.task, 1, model, message) if known else None
    upload = read_or_refuse(lambda: read_upload(content, 1, model, due))
    received = [good] if upload is None else [good, upload]
    rejected = find_unusable(received, model)
    for reason in rejected.values():
        assert reason.isprintable()
    usable = [each for each in received if each.client not in rejected]
    server = method.aggregate(federation.server, usable, {})
    mean_losses(usable)
    method.diagnostics(server, usable)


@fuzzed
@given(record=changed({"partition-id": 1, "text": "x"}, ONE | LISTS), name=st.booleans())
def test_what_nodes_say(record: dict[str, Any], name: bool) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # a message asks
    content = RecordDict({"problem" if name else "node": ConfigRecord(record)})
    problem = problem_in(Message(content, 1, "query"))
    assert (problem is not None) == name
    assert problem is None or (problem.isprintable() and 0 < len(problem) <= 500)
    client = read_or_refuse(lambda: read_client(content, 4))
    assert client is None or client in range(4)


# A node's own files -------------------------------------------------------------------------------

REMEMBERED = save(flatten({"has_previous": torch.ones(()), "model": {"w": torch.ones(3)}}))


@fuzzed
@given(
    content=damaged(REMEMBERED),
    name=st.text(st.characters(exclude_characters="/\0", codec="utf-8"), max_size=8)
    | st.sampled_from(("1", "2", "007", "-1", "1.5", "²", "9" * 40)),
)
def test_memory(tmp_path_factory: Any, content: bytes, name: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "nodes" / "state"
    memory = NodeMemory(RecordDict(), folder, "abc", 0)
    memory.folder.mkdir(parents=True, exist_ok=True)
    for old in memory.folder.iterdir():
        old.unlink()
    (memory.folder / f"client-0-round-{name}.safetensors").write_bytes(content)
    with nothing_outside(folder):
        read_or_refuse(lambda: memory.recall(5))
        read_or_refuse(lambda: memory.keep(5, {"w": torch.zeros(2)}))
    assert read_or_refuse(lambda: NodeMemory(RecordDict(), folder, "abc", 0).recall(6)) is not None


def test_a_nodes_memory_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "abc").symlink_to(tmp_path / "mine")
    with pytest.raises(FedscError, match="is a link"):
        NodeMemory(RecordDict(), tmp_path / "state", "abc", 0).keep(1, {"w": torch.zeros(2)})
    assert list((tmp_path / "mine").iterdir()) == []


# The run configuration ----------------------------------------------------------------------------

KEYS = [opt.name.replace("_", "-") for cls in (RunSpec, NodeOptions) for opt in options_of(cls)]


@fuzzed
@given(
    config=st.dictionaries(
        st.sampled_from((*KEYS, "method", "seed", "x", "out")),
        TEXTS | INTEGERS | FLOATS | st.booleans(),
        max_size=4,
    )
)
def test_run_config(config: dict[str, Any]) -> None:
    found = read_or_refuse(lambda: read_run_config(config))
    for job in found[1] if found else ():
        assert Path(job.name).name == job.name
