"""Real run folders to be damaged, and ways to damage them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from rich.console import Console

from fedsc.data.dataset import Dataset
from fedsc.progress import Silent
from fedsc.spec import RunSpec

from .inputs import changed_json, damaged

METHODS = ("fedsc", "moon", "fedcda")
SETTINGS: dict[str, Any] = {
    **{"dataset": "tiny", "clients": 2, "partition": "iid", "epochs": 1, "model": "mlp"},
    **{"engine": "sequential", "threads": 1},
}
LAND = {
    "grid": [-1.0, 0.0, 1.0],
    "loss": [[1.0, 2.0, 1.5], [0.5, 0.1, None], [1.0, 1.0, 3.0]],
    "models": [{"name": "global", "at": [0, 0], "loss": 1}, {"name": "client 0", "at": [0.5, 0]}],
    "around": {"grid": [-1, 1], "models": [{"name": "global", "loss": [[1, 2], [3, 4]]}]},
}
EMBEDDING = {
    **{"x": [0.0, 1.0, None], "y": [0.0, 1.0, 2.0], "label": [0, 1, 1]},
    **{"classes": ["0", "1"], "client": [0, None, 1], "predicted": [0, 1, 0]},
}
CONSTANTS = ("L1", "sigma2", "B", "L2", "eta", "E", "M", "C", "xi", "L0")
THEORY = {
    **{"bound": [None, 2.0], "observed": [3.0, 1.0], "notes": ["so"], "round_change": 0.1},
    "conditions": [{"name": "step", "needs": "< 1", "has": "2", "holds": False}],
    "constants": dict.fromkeys(CONSTANTS, 1.0),
}


def tiny_data() -> Dataset:
    images = torch.arange(24 * 16, dtype=torch.int64).remainder(256).to(torch.uint8)
    images, labels = images.reshape(24, 1, 4, 4), torch.arange(24) % 2
    return Dataset("tiny", images[:16], labels[:16], images[16:], labels[16:], ("a", "b"))


class StopAfterTwo(Silent):
    def round_done(self, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt


def spec_of(method: str) -> RunSpec:
    return RunSpec(method=method, rounds=3, **SETTINGS)


def options() -> dict[str, Any]:
    return {k: v for k, v in SETTINGS.items() if k not in ("dataset", "model")} | {"model": "mlp"}


TEXT_FILES = ("spec.json", "metrics.jsonl", "partition.json", "summary.json")
ANALYSES = ("landscape.json", "embedding.json", "theory.json", "partition.json")

Change = Callable[[Path], None]


@st.composite
def changes(draw: st.DrawFn, names: tuple[str, ...]) -> Change:
    """What to do to one file of a run folder; the same draw changes any folder alike."""
    name = draw(st.sampled_from(names))
    data = draw(st.data())
    by_value = draw(st.booleans())

    def change(folder: Path) -> None:
        path = folder / name
        valid = path.read_bytes()
        if not by_value or name.endswith(".safetensors"):
            path.write_bytes(data.draw(damaged(valid)))
        elif name.endswith(".jsonl"):
            lines = valid.decode().splitlines()
            place = data.draw(st.integers(0, len(lines) - 1))
            lines[place] = json.dumps(data.draw(changed_json(json.loads(lines[place]))))
            path.write_text("".join(f"{line}\n" for line in lines))
        else:
            path.write_text(json.dumps(data.draw(changed_json(json.loads(valid)))))

    return change


def fresh(originals: Path, place: Path, methods: tuple[str, ...] = METHODS[:2]) -> Path:
    """The runs once more, in a folder of their own."""
    runs = place / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    for text in methods:
        shutil.copytree(originals / f"{text}-seed0", runs / f"{text}-seed0")
    return runs


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)
