"""The one exception that is meant for a person: what was wrong, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedscError(ValueError):
    """A mistake in what the user gave. The command line prints it as one line and exits with 2."""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> FedscError:
    """`unknown method 'fedsk': did you mean 'fedsc'? (allowed: fedavg, fedsc)`"""
    names = list(allowed)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f": did you mean '{near[0]}'?" if near else ""
    return FedscError(f"unknown {kind} '{given}'{hint} (allowed: {', '.join(names)})")


def in_words(error: BaseException) -> str:
    """Somebody else's error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
