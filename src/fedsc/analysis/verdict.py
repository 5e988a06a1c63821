"""`fedsc theory`: what the paper's theorems say of a run, and what the run did."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from ..data.images import Progress as DecodingProgress
from ..errors import FedscError
from ..experiments.folder import RunFolder
from ..methods.fedsc import FedSC
from ..report.runs import RunData
from . import theory
from .constants import estimate, mean_iterations
from .reopen import OnStep, cached, checkpoint_of, rebuild
from .theory import Constants

NOTES = (
    "The estimates are maxima over what was seen: the constants of the assumptions are at least as "
    "large. Larger L1, L2 and σ² make every condition harder to meet; a larger B makes Theorem 2's "
    "easier and Theorem 3's harder.",
    "Theorem 1 replaces the sum of squared gradients, which is subtracted, by E·B². B is an upper "
    "bound of the gradient's norm and the step needs a lower one, so a loss above the bound is no "
    "error of this program: the inequality is not proved.",
    "One step of the proof bounds the change of RPCL by the logarithm of a sum of differences of "
    "exponentials. That does not hold in general; the sum can even be negative.",
    "E counts local iterations here and local epochs elsewhere; B is the bound of the gradient "
    "here and the batch size elsewhere.",
    "The first round has no prototypes: its loss is cross-entropy alone, and the second round's "
    "has two terms more. The bound knows nothing of this.",
)


def theory_of(
    run: RunData,
    xi: float | None = None,
    data_dir: Path | None = None,
    on_step: OnStep = lambda what, done, total: None,
    decoding: DecodingProgress | None = None,
) -> dict[str, Any]:
    """Constants, bound, conditions and notes of a run; computed where theory.json is not current.

    `xi` is the mean squared gradient to be reached (default: that of the last checkpoint).
    """
    if run.spec["method"]["name"] != FedSC.name:
        raise FedscError(f"{run.path} is a run of {run.label}: the theorems are about fedsc only")

    def make() -> dict[str, Any]:
        federation = rebuild(run, data_dir, decoding)
        initial = federation.server
        RunFolder(run.path).read_checkpoint(federation)
        found = estimate(federation, initial, on_step)
        if not (math.isfinite(found.L1 + found.L2 + found.B + found.sigma2) and found.L1 > 0):
            raise FedscError(f"{run.path}: gradients are zero or no numbers, nothing to estimate")
        constants = theory.Constants(
            **{name: getattr(found, name) for name in ("L1", "L2", "B", "sigma2")},
            eta=federation.spec.lr,
            E=mean_iterations(federation),
            M=run.spec["method"]["neighbours"],
            C=federation.data.num_classes,
        )
        wanted = found.gradient2 if xi is None else xi
        return judge(run, constants, wanted, found.first_loss)

    made_from = {**checkpoint_of(run), "records": len(run.records), "xi": xi}
    return cached(run.path / "theory.json", made_from, make)


def judge(run: RunData, constants: Constants, xi: float, first_loss: float) -> dict[str, Any]:
    """The theorems beside the run. `first_loss` is L_0; L* is at least 0, as all terms are."""
    observed = [observed_loss(record) for record in run.records]
    change = theory.round_change(constants)
    bound = [None, *(None if before is None else before + change for before in observed[:-1])]
    return {
        "bound": bound,
        "observed": observed,
        "conditions": conditions(constants, xi, first_loss, len(run.records)),
        "notes": [*findings(run, constants, xi, first_loss, bound, observed), *NOTES],
        "constants": {**dataclasses.asdict(constants), "xi": xi, "L0": first_loss},
        "round_change": change,
    }


def observed_loss(record: dict[str, Any]) -> float | None:
    """All terms of the loss, the mean over clients by samples in their last local epoch."""
    terms = record["train_loss"].values()
    return None if None in terms or not terms else sum(terms)


def conditions(c: Constants, xi: float, first_loss: float, rounds: int) -> list[dict[str, Any]]:
    """What each theorem asks for and what the run has."""
    step2, step3 = theory.largest_step(c), theory.largest_step_for(xi, c)
    needed = theory.rounds_needed(xi, first_loss, c)
    eta = f"η = {c.eta:g}"
    rows = (
        (
            "Theorem 2: any step size at all",
            f"B > {theory.least_gradient(c):.3g}",
            f"B = {c.B:.3g}",
            theory.least_gradient(c) < c.B,
        ),
        ("Theorem 2: step size", below(step2), eta, c.eta < step2),
        (
            "Theorem 3: any step size at all",
            f"ξ > {theory.least_xi(c):.3g}",
            f"ξ = {xi:.3g}",
            xi > theory.least_xi(c),
        ),
        ("Theorem 3: step size", below(step3), eta, c.eta < step3),
        ("Theorem 3: descent", f"η < 2/L1 = {2 / c.L1:.3g}", eta, c.eta * c.L1 < 2),
        (
            "Theorem 3: rounds",
            "no number is enough" if needed is None else f"R > {needed:.3g}",
            f"R = {rounds}",
            needed is not None and rounds > needed,
        ),
    )
    names = "name", "needs", "has", "holds"
    return [dict(zip(names, row, strict=True)) for row in rows]


def below(step: float) -> str:
    return f"η < {step:.3g}" if step > 0 else "no η > 0 does"


def findings(
    run: RunData,
    c: Constants,
    xi: float,
    first_loss: float,
    bound: list[float | None],
    observed: list[float | None],
) -> list[str]:
    """What is so in this run, said plainly."""
    change = theory.round_change(c)
    pairs = [
        (b, o) for b, o in zip(bound, observed, strict=True) if b is not None and o is not None
    ]
    above = sum(o > b for b, o in pairs)
    grows = f"Theorem 1 lets the loss grow by {change:.3g} in a round: as a bound it says nothing."
    falls = f"Theorem 1 says that the loss falls by {-change:.3g} in every round."
    said = [grows if change >= 0 else falls]
    said.append(f"The observed loss lies above the bound in {above} of {len(pairs)} rounds.")
    negative = sum(b < 0 for b, _ in pairs)
    if negative:
        said.append(
            f"The bound lies below 0 in {negative} rounds, where no loss can be: it is none there."
        )
    if theory.least_gradient(c) >= c.B:
        said.append(
            "Theorem 2's condition cannot be met by any step size: with these constants the price "
            "of changing prototypes exceeds all that descending can gain."
        )
    if xi <= theory.least_xi(c):
        reachable = 2 * theory.least_xi(c)
        step = theory.largest_step_for(reachable, c) / 2
        rounds = theory.rounds_needed(reachable, first_loss, dataclasses.replace(c, eta=step))
        said.append(
            f"Theorem 3 speaks of any ξ > 0, but for ξ ≤ {theory.least_xi(c):.3g} no step size "
            f"satisfies it. For twice that, η = {step:.3g} does, with "
            + (f"R > {rounds:.3g}." if rounds is not None else "no number of rounds.")
        )
    schedule = run.spec["method"]["schedule"]
    if schedule != "constant":
        said.append(
            f"The weights of RPCL and CPDR are {schedule} in this run, so each round has a loss of "
            "its own, and the theorems are about one: fedsc,full has constant weights."
        )
    momentum = run.spec["momentum"]
    if momentum:
        longer = (
            f", whose steps are up to {1 / (1 - momentum):.3g} times as long"
            if momentum < 1
            else ""
        )
        said.append(f"The proofs are for plain SGD; this run has momentum {momentum:g}{longer}.")
    if run.spec["weight_decay"]:
        said.append("The run's weight decay is no part of the objective, nor of the proofs.")
    if len(run.records) < run.spec["rounds"]:
        said.append(f"The run is not finished: {len(run.records)} of {run.spec['rounds']} rounds.")
    return said
