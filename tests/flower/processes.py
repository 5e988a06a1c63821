"""Flower's real processes, started as docs/deploy.md says, and all of them stopped at the end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).parents[2]
APP = REPOSITORY / "apps" / "fedsc-flower"
LONGEST_WAIT = 300.0


BLOCKS = itertools.count(20000 + os.getpid() % 20000, 50)  # never the same ports twice


def free_ports(number: int) -> int:
    """The first of so many free ports in a row, fewer than 50."""
    for first in itertools.takewhile(lambda port: port < 60000, BLOCKS):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no free ports")


def until(condition: Callable[[], Any], what: str, seconds: float = LONGEST_WAIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)


def as_run_config(config: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return f"'{value}'" if isinstance(value, str) else str(value).lower()

    return " ".join(f"{name}={text(value)}" for name, value in config.items())


class Processes:
    """Processes that belong to one folder; leaving the context ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY / "src"),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FEDSC_STATE": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }

    def __enter__(self) -> Self:
        try:
            self.begin()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def begin(self) -> None:
        """Start what is needed."""

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        for name in list(self.running):
            self.kill(name)
        if kind is not None:
            for log in sorted(self.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
        # Flower's processes start others, which notice that their parent is gone, or do not.
        for pid in self.descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def start(self, name: str, *command: str, cwd: Path | None = None) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                cwd=cwd or self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def run(self, *command: str, seconds: float = LONGEST_WAIT) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def descendants(self) -> list[int]:
        """Processes that work in our folder: it was made for this test, so we started them."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and (entry / "cwd").resolve().is_relative_to(self.folder):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]


class Simulation(Processes):
    """A SuperLink that simulates nodes with Ray."""

    def begin(self) -> None:
        port = free_ports(1)
        (self.folder / "flwr").mkdir()
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink.federation]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        self.start(
            "superlink",
            *("flower-superlink", "--insecure", "--simulation"),
            *("--host", "127.0.0.1", "--port", str(port)),
            "--disable-runtime-dependency-installation",
        )
        until(lambda: answers(port), "the SuperLink")

    def train(self, nodes: int, config: dict[str, Any]) -> str:
        return self.run(
            *("flwr", "run", str(APP), "federation", "--stream"),
            *("--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=2"),
            *("--run-config", as_run_config(config)),
        )


class Deployment(Processes):
    """A SuperLink and SuperNodes with TLS and node authentication, by `fedsc flower setup`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        super().__init__(folder)
        self.nodes, self.port = nodes, free_ports(nodes + 2)
        self.federation = folder / "federation"
        self.environment["FLWR_HOME"] = str(self.federation / "flwr")

    def begin(self) -> None:
        self.set_up(self.federation, self.nodes)
        self.start_superlink()
        self.run(str(self.federation / "register.sh"))
        for k in range(self.nodes):
            self.start_node(k)

    def set_up(self, folder: Path, nodes: int) -> None:
        address = f"localhost:{self.port}"
        command = "flower", "setup", str(folder), "--nodes", str(nodes), "--address", address
        self.run(sys.executable, "-m", "fedsc", *command)

    def start_superlink(self) -> None:
        self.start("superlink", str(self.federation / "superlink" / "start.sh"))
        until(lambda: answers(self.port), "the SuperLink")

    def start_node(self, k: int) -> None:
        self.start(f"node-{k}", str(self.federation / f"node-{k}" / "start.sh"))

    def train(self, config: dict[str, Any], wait: bool = True) -> str:
        command = str(self.federation / "run.sh"), "--run-config", as_run_config(config)
        return self.run(*command, *(["--stream"] if wait else []))


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
