"""Runs as `fedsc run` leaves them, made once for all that damage copies of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedsc
from fedsc.experiments.runner import execute
from fedsc.methods import method_from_text

from .runs import EMBEDDING, LAND, METHODS, THEORY, StopAfterTwo, options, spec_of, tiny_data


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs of two rounds, as `fedsc run` leaves them, with what analyses add."""
    root = tmp_path_factory.mktemp("originals")
    for text in METHODS:
        folder = root / f"{text}-seed0"
        fedsc.run(tiny_data(), method_from_text(text), out=folder, rounds=2, **options())
        for name, content in (("landscape", LAND), ("embedding", EMBEDDING), ("theory", THEORY)):
            (folder / f"{name}.json").write_text(json.dumps(content))
    return root


@pytest.fixture(scope="session")
def cut_short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs that have a checkpoint after each of two rounds, and a third to go."""
    root = tmp_path_factory.mktemp("cut")
    for text in METHODS:
        out, method = root / f"{text}-seed0", method_from_text(text)
        with pytest.raises(KeyboardInterrupt):
            execute(
                *(spec_of(text), tiny_data(), method, None, out, StopAfterTwo()),
                checkpoint_seconds=0,
            )
    return root


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder to damage copies in. In memory where there is such a place: most of the time would
    be spent on removing files and waiting for the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        (Path(root) / "other").mkdir()
        (Path(root) / "other" / "mine.txt").write_text("mine")
        (Path(root) / "place").mkdir()
        yield Path(root) / "place"
