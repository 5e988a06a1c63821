"""The command line in a process of its own, that may be killed while it writes its checkpoints."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import fedsc.experiments.compare as comparison
from fedsc.cli import main
from fedsc.experiments.runner import execute

FILE_OPERATIONS = ("fsync", "replace", "unlink", "truncate")


def start(arguments: list[str], log: Path, kill_at: int = 0) -> ForkServerProcess:
    """`fedsc` with these arguments; what it says goes to `log`. With `kill_at`, it gets a SIGKILL
    before so many file operations. Processes are forked from one that has imported fedsc once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "fedsc.report.pictures", "sklearn.datasets"])
    process = context.Process(target=run, args=(arguments, log, kill_at))
    process.start()
    return process


def run(arguments: list[str], log: Path, kill_at: int) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    count = [0]
    for name in FILE_OPERATIONS:
        setattr(os, name, counted(getattr(os, name), kill_at, count))
    with_checkpoints = functools.partial(execute, checkpoint_seconds=0)  # every round
    setattr(comparison, "execute", with_checkpoints)  # noqa: B010
    sys.argv = ["fedsc", *arguments]
    try:
        main()
    finally:
        print(f"file operations: {count[0]}", file=sys.stderr, flush=True)


def counted(operation: Callable[..., Any], kill_at: int, count: list[int]) -> Callable[..., Any]:
    """The operation, and the end of this process before the n-th call to any so counted."""

    @functools.wraps(operation)
    def counting(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments, **options)

    return counting
