"""A finished run brought back to life from its folder, to be looked into. Nothing is changed in it.

What is computed here is written beside the run as JSON, with what it was made from, and is made
again only when that has changed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..data.images import Progress as DecodingProgress
from ..engines.sequential import SequentialEngine
from ..errors import FedscError
from ..experiments.checkpoint import unseal
from ..experiments.folder import NEWEST, RunFolder
from ..experiments.runner import build, load
from ..federation import Federation
from ..files import read_json, write_atomically
from ..methods import method_from_text
from ..plugins import refuse_code
from ..report.checks import check_file
from ..report.runs import RunData
from ..spec import RunSpec

OnStep = Callable[[str, int, int | None], None]  # what is being done, how much is, out of how much


def rebuild(
    run: RunData, data_dir: Path | None = None, decoding: DecodingProgress | None = None
) -> Federation:
    """The federation of a run as it was before its first round, on the device that is here."""
    names = [field.name for field in dataclasses.fields(RunSpec)]
    if "data_checksum" not in run.spec:
        raise FedscError(f"{run.path} cannot be rebuilt: its spec.json lacks 'data_checksum'")
    fields = {name: run.spec[name] for name in names if name in run.spec}  # older runs have fewer
    refuse_code(run.path, (run.label, run.spec["model"]))
    # Whatever computed the run, looking into it takes the readable engine in full precision.
    here = {"device": "auto", "engine": "sequential", "precision": "fp32"}
    try:
        spec = RunSpec(**{**fields, "method": run.label, **here})
        method = method_from_text(run.label, spec.dataset)
        data = load(spec, data_dir, decoding)
        with torch.random.fork_rng(devices=[]):
            federation, _ = build(spec, data, method, client_folder=run.path / "clients")
    except FedscError as error:
        raise FedscError(f"{run.path} cannot be rebuilt: {error}") from None
    if not method.shares_weights():
        raise FedscError(
            f"{run.path}: {run.label} has a model for each client and no global one to look into"
        )
    for what, was, now in (
        ("method", run.spec["method"], {"name": method.name, **dataclasses.asdict(method)}),
        ("data_checksum", run.spec["data_checksum"], data.checksum()),
    ):
        if was != now:
            raise FedscError(f"{run.path} cannot be rebuilt: {what} was {was}, is now {now}")
    return federation


def reopen(
    run: RunData, data_dir: Path | None = None, decoding: DecodingProgress | None = None
) -> Federation:
    """The federation of a run as its last checkpoint left it."""
    federation = rebuild(run, data_dir, decoding)
    RunFolder(run.path).read_checkpoint(federation)
    return federation


def engine_of(federation: Federation) -> SequentialEngine:
    assert isinstance(federation.engine, SequentialEngine)  # `rebuild` asked for it
    return federation.engine


def checkpoint_of(run: RunData) -> dict[str, Any]:
    """What tells one state of a run from another: the same specification, the same round."""
    if not (run.path / NEWEST).exists():
        raise FedscError(
            f"{run.path} has no checkpoint yet: wait for it, or go on with fedsc run --resume"
        )
    facts, _ = unseal(run.path / NEWEST)
    return {"hash": run.spec["hash"], "round": facts["round"]}


def cached(path: Path, made_from: dict[str, Any], make: Callable[[], dict[str, Any]]) -> Any:
    """The content of a JSON file, made anew unless it was made from the same."""
    try:
        found = read_json(path)
        check_file(path.stem, found)
        if found.get("made_from") == made_from:
            return found
    except (OSError, ValueError):
        pass  # not there, or not ours to read
    content = {**finite(make()), "made_from": made_from}
    write_atomically(path, (json.dumps(content, allow_nan=False) + "\n").encode())
    return content


def finite(value: Any) -> Any:
    """NaN and infinity are no JSON: a value that does not exist is null."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
