"""Clients that do not answer, answer too late, or send what cannot be used.

A client that drops out of a round is not there: it receives nothing, trains nothing and sends
nothing. A straggler trains, and remembers it, but its upload comes when the round is over and is
thrown away. Who does is drawn beforehand from the seed and the round. An upload that cannot be used
is rejected before anything is averaged, and its client goes on as if it had not trained. Where a
whole client is hidden (`privacy.py`), that an upload is missing would show: there it counts as one
that says nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .data.randomness import generator
from .errors import FedscError
from .method import Upload
from .state import State

# Times the length of the global model: no client that still learns comes anywhere near.
LONGEST = 1000.0


@dataclass(frozen=True)
class Answers:
    """What came of a round's clients."""

    uploads: list[Upload] = field(default_factory=list)  # to be aggregated
    dropped: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)  # why, by client
    received: list[Upload] = field(default_factory=list)  # all, in time or not, sound or not

    @property
    def sound(self) -> list[Upload]:
        """Those to be aggregated that are as the clients sent them."""
        return [upload for upload in self.uploads if upload.client not in self.rejected]

    def record(self) -> dict[str, list[object]]:
        """For the record of the round: only what there is."""
        found: dict[str, list[object]] = {
            "dropped": [*self.dropped],
            "late": [*self.late],
            "rejected": [{"client": k, "reason": why} for k, why in self.rejected.items()],
        }
        return {name: clients for name, clients in found.items() if clients}


class TooFewClientsError(FedscError):
    """A round has fewer usable uploads than `min_clients`."""

    def __init__(self, round: int, answers: Answers, min_clients: int) -> None:
        lost = [
            f"{len(clients)} {what}"
            for what, clients in (
                ("dropped out", answers.dropped),
                ("late", answers.late),
                ("rejected", answers.rejected),
            )
            if clients
        ]
        reasons = [f"client {k}: {reason}" for k, reason in answers.rejected.items()]
        super().__init__(
            f"round {round} has {len(answers.uploads)} usable uploads, --min-clients asks for "
            f"{min_clients} ({', '.join(lost) or 'the cohort is smaller'}"
            + (f"; {reasons[0]}" if reasons else "")
            + "): start another run with a smaller --min-clients"
        )


def draw_faults(
    seed: int, round: int, num_clients: int, dropout: float, straggler: float
) -> tuple[set[int], set[int]]:
    """The clients that drop out of a round, and those of the others that are late.

    A client's fate does not depend on who else takes part, and raising one probability only adds
    to those it befalls.
    """
    if not dropout and not straggler:
        return set(), set()
    drawn = generator("faults", seed, round).random((2, num_clients))
    dropped = set((drawn[0] < dropout).nonzero()[0].tolist())
    late = set((drawn[1] < straggler).nonzero()[0].tolist())
    return dropped, late - dropped


def find_unusable(uploads: list[Upload], model: State, any_length: bool = False) -> dict[int, str]:
    """The clients whose uploads cannot be aggregated into the global model, and why."""
    if not uploads:
        return {}
    usual_extra, usual_model = shapes(usually_sent(uploads)), shapes(model)
    longest = math.inf if any_length else LONGEST * max(1.0, length(model))
    found = {}
    for upload in uploads:
        reason = (
            unlike(shapes(upload.model), usual_model)
            or unlike(shapes(upload.extra), usual_extra)
            or not_finite(upload.model, longest)
            or not_finite(upload.extra, math.inf)
        )
        if reason:
            found[upload.client] = reason
    return found


def usually_sent(uploads: list[Upload]) -> State:
    """What a method sends beside the weights, only the method knows: as most of its clients do."""
    usual = Counter(shapes(upload.extra) for upload in uploads).most_common(1)[0][0]
    return next(upload.extra for upload in uploads if shapes(upload.extra) == usual)


Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def shapes(state: State) -> Shapes:
    return tuple((name, tuple(t.shape), t.dtype) for name, t in sorted(tensors(state)))


def unlike(ours: Shapes, usual: Shapes) -> str | None:
    """The first tensor that is missing, superfluous or of another shape or type."""
    if ours == usual:
        return None
    here, there = ({name: rest for name, *rest in found} for found in (ours, usual))
    for name in sorted({*here, *there}):
        if name not in here:
            return f"{name} is missing"
        if name not in there:
            return f"{name} is not asked for"
        if here[name] != there[name]:
            (shape, dtype), (right_shape, right_dtype) = here[name], there[name]
            words = (shape, right_shape) if shape != right_shape else (dtype, right_dtype)
            return f"{name} is {words[0]}, not {words[1]}"
    return None


def not_finite(state: State, longest: float) -> str | None:
    """Whether a state holds NaN or infinity, or is longer than it may be."""
    total = length(state)
    if total <= longest and math.isfinite(total):
        return None
    for name, tensor in sorted(tensors(state)):
        if not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
    return f"its length {total:.3g} is above {longest:.3g}" if total > longest else None


def length(state: State) -> float:
    """The norm of all floating-point numbers of a state as one vector; NaN if one of them is."""
    floats = [t for _, t in tensors(state) if t.is_floating_point()]
    if not floats:
        return 0.0
    # One pass in the tensors' own precision; a sum that overflows is looked at again by the caller.
    return float(torch.nn.utils.get_total_norm(floats))


def tensors(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested state where they are, by names like "model/fc.weight"."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from tensors(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value
