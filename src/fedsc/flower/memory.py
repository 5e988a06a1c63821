"""What a client remembers between rounds (MOON's previous model), on its own node.

In the run's `context.state`, and in a file: a SuperNode's state ends with its process, and a run
that is resumed is a new run to Flower. The files of the last two rounds are kept, because a resumed
run may repeat the last one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import save

from ..errors import FedscError
from ..files import explain_write_errors, read_bytes, refuse_link, write_atomically
from ..state import State, flatten, read_state
from .records import is_run_name, read_state_like, to_record

KEPT_ROUNDS = 2


def default_state_dir() -> Path:
    """$FEDSC_STATE, else ~/.local/state/fedsc."""
    given = os.environ.get("FEDSC_STATE")
    return Path(given).expanduser() if given else Path.home() / ".local" / "state" / "fedsc"


class NodeMemory:
    """The memory of one client in one training."""

    def __init__(self, state: RecordDict, state_dir: Path, run: str, client: int) -> None:
        if not is_run_name(run):
            raise FedscError(f"a run cannot be called {run!r}")
        self.state, self.run, self.client = state, run, client
        self.folder = state_dir / run

    def recall(self, round: int) -> State | None:
        """What the client remembered last before this round, if anything."""
        of: dict[str, Any] = dict(self.state.config_records.get("memory-of", {}))
        if of.get("run") == self.run and of["round"] < round:
            return read_state_like(self.state, "memory", {})
        earlier = [(r, path) for r, path in self.files() if r < round]
        if not earlier:
            return None
        path = max(earlier)[1]
        try:
            return read_state(read_bytes(path))
        except (OSError, ValueError) as error:
            raise FedscError(f"cannot read what this client remembers, {path}: {error}") from None

    def keep(self, round: int, memory: State) -> None:
        self.state["memory"] = to_record(memory)
        self.state["memory-of"] = ConfigRecord({"run": self.run, "round": round})
        with explain_write_errors(self.folder):
            refuse_link(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"client-{self.client}-round-{round}.safetensors"
        write_atomically(path, save(flatten(memory)))
        with explain_write_errors(self.folder):
            for _, old in sorted(self.files())[:-KEPT_ROUNDS]:
                old.unlink(missing_ok=True)

    def files(self) -> list[tuple[int, Path]]:
        pattern = re.compile(rf"client-{self.client}-round-([0-9]{{1,9}})\.safetensors")
        found = ((pattern.fullmatch(path.name), path) for path in self.folder.glob("client-*"))
        return [(int(match[1]), path) for match, path in found if match]
