"""Theorems 1 to 3 of the paper, as formulas.

eta is the step size, E the number of local iterations in a round, M FedSC's neighbours, C the
number of classes. L1 bounds how fast the gradient changes with the weights (Assumption 1), sigma2
the variance of a batch's gradient (2), B the norm of a batch's gradient (3), L2 how fast features
change with the weights (4). `docs/theory.md` says where the proofs do not carry.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What the theorems speak of."""

    L1: float
    L2: float
    B: float
    sigma2: float
    eta: float
    E: float
    M: int
    C: int

    @property
    def prototype_term(self) -> float:
        """(M+2) L2 |C| B / (M+1): what changing prototypes may cost, per unit of step."""
        return (self.M + 2) * self.L2 * self.C * self.B / (self.M + 1)


def round_change(c: Constants) -> float:
    """Theorem 1: L after a round <= L before it + this."""
    descent = (c.eta - c.L1 * c.eta**2 / 2) * c.E * c.B**2
    noise = c.L1 * c.E * c.eta**2 / 2 * c.sigma2
    return -descent + noise + c.E * c.eta * c.prototype_term


def least_gradient(c: Constants) -> float:
    """Theorem 2 has a step size only for B above this: (M+2) L2 |C| / (M+1)."""
    return (c.M + 2) * c.L2 * c.C / (c.M + 1)


def largest_step(c: Constants) -> float:
    """Theorem 2: L falls in every round for eta below this; without any such eta it is <= 0."""
    return 2 * (c.B**2 - c.prototype_term) / (c.L1 * (c.sigma2 + c.B**2))


def least_xi(c: Constants) -> float:
    """Theorem 3 has a step size only for xi above this, not for "any xi > 0"."""
    return c.prototype_term


def largest_step_for(xi: float, c: Constants) -> float:
    """Theorem 3: the mean squared gradient falls to xi for eta below this; <= 0: for none."""
    return 2 * (xi - c.prototype_term) / (c.L1 * (xi + c.sigma2))


def rounds_needed(xi: float, loss_gap: float, c: Constants) -> float | None:
    """Theorem 3: R above this brings the mean squared gradient to xi; None where no R does.

    `loss_gap` is L_0 - L*.
    """
    omega1 = (c.M + 1) * c.L1 * c.E * c.eta**2 * c.sigma2
    omega2 = 2 * (c.M + 1) * c.E * c.eta * c.prototype_term
    gain = xi * c.E * c.eta * (c.M + 1) * (2 - c.L1 * c.eta) - (omega1 + omega2)
    return 2 * (c.M + 1) * loss_gap / gain if gain > 0 else None
