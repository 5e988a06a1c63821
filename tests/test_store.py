"""Clients' states: in memory up to a limit, on disk beyond it, and whole after a restart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsc
from fedsc import FedscError
from fedsc.state import State
from fedsc.store import ClientStore


def state(value: float, floats: int = 250) -> State:
    """About a kilobyte, nested as MOON's memory is."""
    return {"model": {"layer.weight": torch.full((floats,), value)}, "seen": torch.tensor(value)}


def value_of(stored: State) -> float:
    assert torch.equal(stored["model"]["layer.weight"], torch.full((250,), float(stored["seen"])))
    return float(stored["seen"])


def bytes_in_memory(store: ClientStore) -> int:
    return sum(s["model"]["layer.weight"].numel() * 4 + 4 for s in store._in_memory.values())


def test_it_behaves_like_a_dict_whatever_the_limit(tmp_path: Path) -> None:
    rng = random.Random(0)
    for limit in (1, 3_000, 10**9):
        store, reference = ClientStore("x", limit, tmp_path / str(limit)), dict[int, float]()
        for _ in range(300):
            client, value = rng.randrange(20), float(rng.randrange(1000))
            action = rng.random()
            if action < 0.5:
                store[client] = state(value)
                reference[client] = value
            elif action < 0.6 and client in reference:
                del store[client], reference[client]
            elif action < 0.7:
                store.discard_unused(store.save().values())
            assert (client in store) == (client in reference)
            if client in reference:
                assert value_of(store[client]) == reference[client]
            assert list(store) == sorted(reference)
            assert len(store) == len(reference)
            assert bytes_in_memory(store) <= max(limit, 1004)


def test_a_thousand_clients_take_the_memory_of_ten(tmp_path: Path) -> None:
    limit = 10 * 1004
    store = ClientStore("memory", limit, tmp_path)
    for client in range(1000):
        store[client] = state(float(client))
        assert bytes_in_memory(store) <= limit
    assert [value_of(store[client]) for client in range(1000)] == list(range(1000))


def test_what_a_checkpoint_names_is_there_whatever_is_written_afterwards(tmp_path: Path) -> None:
    store = ClientStore("memory", 2_000, tmp_path)
    for client in range(5):
        store[client] = state(client)
    files = store.save()
    store.discard_unused(files.values())
    for client in range(5):  # the next round, killed before its checkpoint
        store[client] = state(100 + client)
    restarted = ClientStore("memory", 2_000, tmp_path)
    restarted.restore(files)
    assert [value_of(restarted[client]) for client in range(5)] == list(range(5))
    restarted[0] = state(7)
    files = restarted.save()
    restarted.discard_unused(files.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files.values())
    assert [value_of(restarted[client]) for client in range(5)] == [7, 1, 2, 3, 4]


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    store = ClientStore("memory", 1, tmp_path)
    store[0], store[1] = state(0), state(1)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"not a state")
    with pytest.raises(FedscError, match=file.name):
        store[0]
    file.unlink()
    with pytest.raises(FedscError, match=file.name):
        store[0]


def test_a_checkpoint_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    secret = tmp_path / "memory-0-1.safetensors"
    secret.write_bytes(b"secret")
    inside = tmp_path / "run"
    store = ClientStore("memory", 1, inside)
    store.restore({"0": "../memory-0-1.safetensors"})
    with pytest.raises(FedscError, match="run/memory-0-1"):
        store[0]


@pytest.mark.parametrize("method", ["moon", "fedcda,warmup=0"])
def test_many_clients_run_with_their_states_on_disk(method: str) -> None:
    """Two hundred clients of seven images, five a round, memory for less than one of them."""
    many: dict[str, Any] = {
        "clients": 200,
        "participation": 0.025,
        "partition": "iid",
        "rounds": 6,
        "epochs": 1,
    }
    on_disk, in_memory = (
        fedsc.run("digits", method, client_memory=limit, **many) for limit in (1e-5, 4.0)
    )
    for name, tensor in in_memory.server["model"].items():
        assert torch.equal(on_disk.server["model"][name], tensor)


def test_files_do_not_pile_up_between_checkpoints(tmp_path: Path) -> None:
    store = ClientStore("memory", 1, tmp_path)
    for value in range(50):
        for client in range(4):
            store[client] = state(value)
    assert len(list(tmp_path.iterdir())) <= 4
    files = store.save()
    for client in range(4):
        store[client] = state(100 + client)
    assert {path.name for path in tmp_path.iterdir()} >= set(files.values())
