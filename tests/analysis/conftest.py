"""A small comparison, run once for all tests that look into run folders."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedsc
from fedsc.report.runs import RunData, read_run


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders METHOD-seedN of three methods and two seeds. Look, do not change."""
    out = tmp_path_factory.mktemp("small")
    digits = fedsc.load_dataset("digits")
    for method in ("fedavg", "fedsc", "fednh"):
        for seed in (0, 1):
            fedsc.run(
                digits,
                method,
                out=out / f"{method}-seed{seed}",
                seed=seed,
                rounds=3,
                epochs=2,
                lr=0.05,
                clients=4,
                partition="nid1:0.5",
                train_limit=300,
                device="cpu",
            )
    return out


@pytest.fixture
def copied(run_folders: Path, tmp_path: Path) -> Path:
    """The same folders, to be written into."""
    import shutil

    return Path(shutil.copytree(run_folders, tmp_path / "runs"))


@pytest.fixture
def fedsc_run(copied: Path) -> RunData:
    return read_run(copied / "fedsc-seed0")
