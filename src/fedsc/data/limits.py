"""How much a small file may become in memory."""

from __future__ import annotations

from ..errors import FedscError

ALWAYS_FINE = 1 << 30  # bytes
LARGEST_RATIO = 200  # a photograph has 2 to 30; what is all zeros comes near 1000


def check_expansion(what: str, packed: int, unpacked: int) -> None:
    """Raises FedscError where few bytes are about to become very many: that is no data set."""
    if unpacked > max(ALWAYS_FINE, LARGEST_RATIO * packed):
        raise FedscError(
            f"{what} would become {unpacked / 2**30:,.1f} GiB from {packed / 2**20:,.1f} MiB "
            f"(allowed: 1 GiB, or {LARGEST_RATIO} times the size of the files)"
        )
