"""The audit's verdict on what pip-audit writes, by its own formatter and as recorded."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pip_audit._format.json import JsonFormat
from pip_audit._service.interface import (
    Dependency,
    ResolvedDependency,
    SkippedDependency,
    VulnerabilityResult,
)

from tests.audit import judge

# Recorded on a machine that reaches package files and no advisory database; pip-audit exited 0.
RECORDED_WITHOUT_THE_DATABASE = """{"dependencies": [{"name": "torch", "skip_reason": "Dependency
not found on PyPI and could not be audited: torch (2.13.0)"}, {"name": "numpy", "skip_reason":
"Dependency not found on PyPI and could not be audited: numpy (2.4.6)"}], "fixes": []}"""

CLEAN = ResolvedDependency("torch", Version("2.13.0"))
OTHER = ResolvedDependency("pillow", Version("9.0.0"))
FAULT = VulnerabilityResult(
    id="PYSEC-2022-10", description="x", fix_versions=[Version("9.0.1")], aliases=set()
)
UNKNOWN = SkippedDependency(name="numpy", skip_reason="not found")


def written(found: dict[Dependency, list[VulnerabilityResult]]) -> Any:
    return json.loads(JsonFormat(False, False).format(found, []))


def test_clean() -> None:
    assert judge(written({CLEAN: []})) == (0, ["no known fault in 1 packages"])


def test_a_known_fault() -> None:
    status, lines = judge(written({CLEAN: [], OTHER: [FAULT]}))
    assert status == 1
    assert lines[0] == "pillow 9.0.0: PYSEC-2022-10, fixed in 9.0.1"


@pytest.mark.parametrize(
    "report",
    [
        written({CLEAN: [], UNKNOWN: []}),
        json.loads(RECORDED_WITHOUT_THE_DATABASE.replace("\n", " ")),
        {"dependencies": [], "fixes": []},
    ],
)
def test_what_was_not_looked_up_is_a_failure_of_the_audit(report: Any) -> None:
    status, lines = judge(report)
    assert status == 2
    assert "the audit has failed" in lines[-1]


def test_faults_are_told_even_if_others_were_not_looked_up() -> None:
    status, lines = judge(written({OTHER: [FAULT], UNKNOWN: []}))
    assert status == 2
    assert "PYSEC-2022-10" in lines[0]


def test_all_that_is_installed_is_pinned_and_so_looked_up() -> None:
    lines = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    needed: set[str] = set()
    left = [Requirement("fedsc[report,track,flower,export,privacy,dev]")]
    while left:
        wanted = left.pop()
        for text in importlib.metadata.requires(wanted.name) or []:
            inner = Requirement(text)
            name = canonicalize_name(inner.name)
            marks = [{"extra": extra} for extra in (wanted.extras or {""})]
            here = inner.marker is None or any(map(inner.marker.evaluate, marks))
            if wanted.name == "torch" and name.startswith(("cuda-", "nvidia-", "triton")):
                continue  # of PyTorch's CUDA build, which constraints.txt does not install
            if here and name != "pip" and str(inner) not in needed:  # pip is of the environment
                needed.add(str(inner))
                left.append(inner)
                assert name in pinned, f"{name}, which {wanted.name} needs, is not in constraints"
    assert len(needed) > 50
