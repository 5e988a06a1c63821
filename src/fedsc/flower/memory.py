"""What a client remembers between rounds (MOON's previous model), on its own node.

In the run's `context.state`, and in a file: a SuperNode's state ends with its process, and a run
that is resumed is a new run to Flower. The files of the last two rounds are kept, because a resumed
run may repeat the last one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..errors import FedscError
from ..files import explain_write_errors, write_atomically
from ..state import State, flatten, unflatten
from .records import to_record, to_state

KEPT_ROUNDS = 2


def default_state_dir() -> Path:
    """$FEDSC_STATE, else ~/.local/state/fedsc."""
    given = os.environ.get("FEDSC_STATE")
    return Path(given).expanduser() if given else Path.home() / ".local" / "state" / "fedsc"


class NodeMemory:
    """The memory of one client in one training."""

    def __init__(self, state: RecordDict, state_dir: Path, run: str, client: int) -> None:
        self.state, self.run, self.client = state, run, client
        self.folder = state_dir / run

    def recall(self, round: int) -> State | None:
        """What the client remembered last before this round, if anything."""
        of: dict[str, Any] = dict(self.state.config_records.get("memory-of", {}))
        if of.get("run") == self.run and of["round"] < round:
            return to_state(self.state.array_records["memory"])
        earlier = [(r, path) for r, path in self.files() if r < round]
        if not earlier:
            return None
        path = max(earlier)[1]
        try:
            return unflatten(load(path.read_bytes()))
        except (OSError, SafetensorError) as error:
            raise FedscError(f"cannot read what this client remembers, {path}: {error}") from None

    def keep(self, round: int, memory: State) -> None:
        self.state["memory"] = to_record(memory)
        self.state["memory-of"] = ConfigRecord({"run": self.run, "round": round})
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"client-{self.client}-round-{round}.safetensors"
        write_atomically(path, save(flatten(memory)))
        for _, old in sorted(self.files())[:-KEPT_ROUNDS]:
            old.unlink(missing_ok=True)

    def files(self) -> list[tuple[int, Path]]:
        found = self.folder.glob(f"client-{self.client}-round-*.safetensors")
        return [(int(path.stem.rsplit("-", 1)[1]), path) for path in found]
