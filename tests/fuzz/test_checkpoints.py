"""Broken and forged checkpoints: none is taken for another, and none does harm."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsc.errors import FedscError
from fedsc.experiments.checkpoint import ZEROS, unseal
from fedsc.experiments.folder import BEST, NEWEST, PREVIOUS
from fedsc.experiments.runner import execute
from fedsc.experiments.trained import load_trained
from fedsc.methods import method_from_text
from fedsc.store import ClientStore

from .inputs import changed_json, damaged, fuzzed, nothing_outside, read_or_refuse
from .runs import METHODS, changes, fresh, spec_of, tiny_data

STATES = (NEWEST, PREVIOUS)


def taken_apart(content: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header without our facts, the facts without their checksum, and the tensors."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    facts = json.loads(header.pop("__metadata__")["fedsc"])
    facts.pop("sha256")
    return header, facts, content[8 + size :]


def forged(header: Any, facts: Any, tensors: bytes) -> bytes:
    """A checkpoint file whose checksum fits, whatever it holds."""
    if isinstance(facts, dict):
        facts = {"sha256": ZEROS, **facts}
    if isinstance(header, dict):
        header = {"__metadata__": {"fedsc": json.dumps(facts)}, **header}
    text = json.dumps(header).encode()
    content = bytearray(len(text).to_bytes(8, "little") + text + tensors)
    place = content.find(ZEROS.encode())
    if place >= 0:
        content[place : place + 64] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def resume(method: str, folder: Path) -> None:
    execute(spec_of(method), tiny_data(), method_from_text(method), None, folder, resume=True)


def test_what_is_taken_apart_can_be_forged(cut_short: Path, tmp_path: Path) -> None:
    valid = cut_short / "moon-seed0" / NEWEST
    (tmp_path / "a").write_bytes(forged(*taken_apart(valid.read_bytes())))
    facts, state = unseal(tmp_path / "a")
    assert facts == unseal(valid)[0]
    assert torch.equal(
        state["model"]["classifier.weight"], unseal(valid)[1]["model"]["classifier.weight"]
    )


@fuzzed
@given(method=st.sampled_from(METHODS), data=st.data())
def test_a_damaged_file_is_found_out(
    cut_short: Path, place: Path, method: str, data: st.DataObject
) -> None:
    valid = (cut_short / f"{method}-seed0" / NEWEST).read_bytes()
    content = data.draw(damaged(valid))
    (place / NEWEST).write_bytes(content)
    assert read_or_refuse(lambda: unseal(place / NEWEST)) is None or content == valid


@fuzzed
@given(method=st.sampled_from(METHODS), data=st.data())
def test_a_forged_header(cut_short: Path, place: Path, method: str, data: st.DataObject) -> None:
    """Names, types, shapes and places of tensors that the header makes up."""
    header, facts, tensors = taken_apart((cut_short / f"{method}-seed0" / NEWEST).read_bytes())
    (place / NEWEST).write_bytes(forged(data.draw(changed_json(header)), facts, tensors))
    read_or_refuse(lambda: unseal(place / NEWEST))


@fuzzed
@given(
    method=st.sampled_from(METHODS),
    name=st.sampled_from(STATES),
    in_facts=st.booleans(),
    data=st.data(),
)
def test_resume_from_forged(
    cut_short: Path, place: Path, method: str, name: str, in_facts: bool, data: st.DataObject
) -> None:
    folder = fresh(cut_short, place, (method,)) / f"{method}-seed0"
    header, facts, tensors = taken_apart((folder / name).read_bytes())
    if in_facts:
        facts = data.draw(changed_json(facts))
    else:
        header = data.draw(changed_json(header))
    (folder / name).write_bytes(forged(header, facts, tensors))
    shutil.copyfile(folder / name, folder / BEST)
    with nothing_outside(place):
        read_or_refuse(lambda: resume(method, folder))


def test_a_state_that_only_its_method_can_judge(cut_short: Path, tmp_path: Path) -> None:
    """FedCDA's server has heard of clients of which it keeps nothing."""
    folder = tmp_path / "run"
    shutil.copytree(cut_short / "fedcda-seed0", folder)
    (folder / PREVIOUS).unlink()
    header, facts, tensors = taken_apart((folder / NEWEST).read_bytes())
    (folder / NEWEST).write_bytes(forged(header, {**facts, "records": {}}, tensors))
    with pytest.raises(FedscError, match="cannot go on from its checkpoint: KeyError"):
        resume("fedcda", folder)


@fuzzed
@given(method=st.sampled_from(("fedsc", "moon")), data=st.data())
def test_the_model_of_a_run(originals: Path, place: Path, method: str, data: st.DataObject) -> None:
    """What `fedsc export` and `fedsc predict` read."""
    folder = fresh(originals, place, (method,)) / f"{method}-seed0"
    if data.draw(st.booleans()):
        data.draw(changes(("spec.json", "partition.json")))(folder)
    else:
        header, facts, tensors = taken_apart((folder / NEWEST).read_bytes())
        (folder / NEWEST).write_bytes(forged(data.draw(changed_json(header)), facts, tensors))

    def classify() -> None:
        trained = load_trained(folder)
        images = torch.zeros(2, *trained.image_shape, dtype=torch.uint8)
        trained.probabilities(images, "classifier")
        trained.probabilities(images, "prototype")

    with nothing_outside(place):
        read_or_refuse(classify)


def test_the_model_of_a_run_cannot_have_its_code_run(originals: Path, tmp_path: Path) -> None:
    code = tmp_path / "evil.py"
    code.write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\n")
    for changed in ({"model": f"{code}:Evil"}, {"label": f"{code}:Evil"}):
        folder = tmp_path / "run"
        shutil.copytree(originals / "fedsc-seed0", folder)
        spec = json.loads((folder / "spec.json").read_text())
        (folder / "spec.json").write_text(json.dumps(spec | changed))
        with pytest.raises(FedscError, match="asks to run the code in"):
            load_trained(folder)
        shutil.rmtree(folder)
    assert not (tmp_path / "pwned").exists()


@fuzzed
@given(data=st.data())
def test_the_state_of_a_client(cut_short: Path, place: Path, data: st.DataObject) -> None:
    """A file with a name that fits its content, and one whose name does not."""
    valid = next((cut_short / "moon-seed0" / "clients").iterdir()).read_bytes()
    content = data.draw(damaged(valid))
    checksum = hashlib.sha256(content).hexdigest()[:32]
    store = ClientStore("memory", 1 << 20, place)
    for name, fits in ((f"memory-0-{checksum}.safetensors", True), ("memory-0-x", False)):
        (place / name).write_bytes(content)
        store.restore({"0": name})
        found = read_or_refuse(lambda: store[0])
        assert fits or found is None
        (place / name).unlink()


# What is no file ----------------------------------------------------------------------------------


def lead_outside(path: Path, mine: Path) -> None:
    path.symlink_to(mine)


def lead_nowhere(path: Path, mine: Path) -> None:
    path.symlink_to(mine.with_name("nowhere"))


def never_end(path: Path, mine: Path) -> None:
    path.symlink_to("/dev/zero")


def never_begin(path: Path, mine: Path) -> None:
    os.mkfifo(path)


def be_a_folder(path: Path, mine: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [lead_outside, lead_nowhere, never_end, never_begin, be_a_folder])
@pytest.mark.parametrize(
    "name",
    [
        *(NEWEST, PREVIOUS, BEST, "metrics.jsonl", "spec.json", "environment.json", "clients"),
        *(f"{NEWEST}.part", "metrics.jsonl.part", "summary.json", "summary.json.part", "a client"),
    ],
)
def test_what_is_no_file(cut_short: Path, tmp_path: Path, make: Any, name: str) -> None:
    """The run goes on or is refused, and nothing is written to where a link leads."""
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    folder = tmp_path / "inner" / "run"
    shutil.copytree(cut_short / "moon-seed0", folder)
    path = folder / name if name != "a client" else next((folder / "clients").iterdir())
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path, mine)
    with nothing_outside(tmp_path / "inner"):
        read_or_refuse(lambda: resume("moon", folder))
    assert mine.read_bytes() == b"mine"
