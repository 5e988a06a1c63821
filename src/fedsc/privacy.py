"""Differential privacy: what is clipped, what noise is added, and what it costs.

Two units. Neighbouring federations differ in one of them, which in one is replaced by nothing:

    record   one image of one client. Noise is added by the client, to its weights and prototypes
             before the server has them: DP-SGD for the weights, clipped features and noised class
             sums and counts for the prototypes.
    client   all of a client. Noise is added by the server to the sum over the round's clients, of
             clipped updates and of clipped prototypes; the method's server sees nothing else.

The guarantee is for those weights and prototypes, and for whoever does not know the seed. The files
of a run hold more: its records have exact losses (docs/robustness.md lists what is left out).

Noise is Gaussian, `noise` times the largest change that one unit can make. Accounting is Opacus'
Renyi accountant, composed over all releases of all rounds. How many records a client holds (n_k)
and who takes part in which round are public; which classes a client holds is not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .data.plan import steps_per_epoch
from .data.randomness import generator
from .errors import FedscError
from .method import Method, Upload
from .spec import RunSpec
from .state import State

Unit = Literal["none", "record", "client"]

# A class whose noised count is below this many standard deviations of the noise counts as absent.
PRESENT_DEVIATIONS = 3.0
LEAST_NOISE, MOST_NOISE = 0.2, 1e5  # where a target epsilon is looked for
# Opacus' own orders and some beyond, for very little noise and for very much.
ORDERS = (
    *(1 + x / 100 for x in range(1, 10)),
    *(1 + x / 10 for x in range(1, 100)),
    *range(12, 64),
    *(2**x for x in range(6, 15)),
)
# A bound from these alone is a few percent larger, and found in a tenth of the time.
FEW_ORDERS = (1.5, 2.5, 3.5, 4.5, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 512, 2048)


@dataclasses.dataclass(frozen=True)
class Privacy:
    """The mechanisms of a run. A bound of None: neither clipped nor noised."""

    unit: Unit = "none"
    clip: float | None = None  # L2, of a record's gradient or of a client's update
    noise: float = 0.0  # in units of `clip`
    feature_clip: float | None = None  # L2, of a feature vector
    prototype_noise: float = 0.0  # in units of `feature_clip`, and of 1 for counts
    delta: float = 1e-5

    @property
    def trains_privately(self) -> bool:
        """DP-SGD in place of the ordinary step."""
        return self.unit == "record" and self.clip is not None

    @property
    def hides_updates(self) -> bool:
        """The server sees the noised mean of the clients' updates alone."""
        return self.unit == "client" and self.clip is not None

    @property
    def hides_features(self) -> bool:
        return self.unit == "record" and self.feature_clip is not None


NOT_PRIVATE = Privacy()


# Clipping and noise -------------------------------------------------------------------------------


def clip_rows(vectors: Tensor, bound: float) -> Tensor:
    """Each vector along the last dimension scaled down to the length `bound` where it is longer.

    One without a finite length, which no factor could bound, becomes zero.
    """
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    clipped = torch.where(length > bound, vectors * (bound / length.clamp_min(1e-30)), vectors)
    return torch.where(length.isfinite(), clipped, 0)


def gaussian(like: Tensor, deviation: float, rng: np.random.Generator) -> Tensor:
    """Noise of the shape, type and device of a tensor."""
    drawn = rng.standard_normal(tuple(like.shape), dtype=np.float32) * np.float32(deviation)
    return torch.from_numpy(np.asarray(drawn)).to(like)


def noised_totals(totals: State, clip: float, noise: float, rng: np.random.Generator) -> State:
    """A client's class sums (C, d) of features no longer than `clip`, and counts (C,), with noise.

    One record changes one sum by `clip` at most and one count by 1. What follows is done to the
    noised numbers alone: a class with next to no count becomes absent, and a sum is no longer than
    so many features can make it.
    """
    if not noise:
        return totals
    sums = totals["sums"] + gaussian(totals["sums"], noise * clip, rng)
    counts = totals["counts"] + gaussian(totals["counts"], noise, rng)
    counts = torch.where(counts > PRESENT_DEVIATIONS * noise, counts, 0)
    length = torch.linalg.vector_norm(sums, dim=-1).clamp_min(1e-30)
    longest = counts * clip
    return {"sums": sums * (longest / length).clamp_max(1)[:, None], "counts": counts}


def poisson_batches(
    num_samples: int, rate: float, steps: int, rng: np.random.Generator
) -> list[Tensor]:
    """Batches of positions: every record is in each of them with probability `rate`, on its own."""
    picked = rng.random((steps, num_samples)) < rate
    return [torch.from_numpy(np.flatnonzero(row)) for row in picked]


def noised_mean_model(
    before: State, models: Sequence[State], clip: float, noise: float, rng: np.random.Generator
) -> State:
    """DP-FedAvg: the model, moved by the mean of the clients' clipped updates, with noise.

    An update is one vector over all floating tensors. One without a finite length cannot be clipped
    and counts as zero. Integer buffers stay as they were.
    """
    floats = [name for name, tensor in before.items() if tensor.is_floating_point()]
    summed = {name: torch.zeros_like(before[name]) for name in floats}
    for model in models:
        update = {name: model[name] - before[name] for name in floats}
        squares = torch.stack([change.double().square().sum() for change in update.values()])
        length = float(squares.sum().sqrt())
        if not math.isfinite(length):
            continue
        scale = min(1.0, clip / max(length, 1e-30))
        for name in floats:
            summed[name].add_(update[name], alpha=scale)
    moved = dict(before)
    for name in floats:
        noised = summed[name] + gaussian(summed[name], noise * clip, rng)
        moved[name] = before[name] + noised / len(models)
    return moved


def pooled_prototypes(
    prototypes: Tensor, held: Tensor, clip: float, noise: float, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """One noised prototype per class (C, d) from all clients' (K, C, d), and which exist (C,).

    A client gives, for each class it holds (`held` (K, C)), its prototype in units of `clip` and a
    1; all of that is scaled down to length 1, which is what one client can change. Prototypes and
    ones shrink alike, so a mean over few classes is not drawn towards zero. A prototype that is not
    finite is none.
    """
    held = held & prototypes.isfinite().all(-1)
    prototypes = torch.where(held[..., None], prototypes, 0)
    ones = held.to(prototypes.dtype)[..., None]
    given = torch.cat([clip_rows(prototypes / clip, 1.0) * ones, ones], -1)
    given = clip_rows(given.flatten(1), 1.0).view_as(given)
    summed = given.sum(0)
    summed = summed + gaussian(summed, noise, rng)
    total = summed[:, -1]
    exists = total > PRESENT_DEVIATIONS * noise
    mean = summed[:, :-1] / torch.where(exists, total, 1)[:, None]
    if noise:
        mean = clip_rows(mean, 1.0)
    return torch.where(exists[:, None], mean * clip, 0), exists


# Accounting ---------------------------------------------------------------------------------------


def saying_nothing(upload: Upload, model: State, usual: State) -> Upload:
    """An upload that cannot be used, as one of a client that did not move and holds no class.

    `usual` is what clients send beside the weights. To leave it out instead would change the number
    that the sum is divided by, which the noise does not hide.
    """
    extra = {name: torch.zeros_like(tensor) for name, tensor in usual.items()}
    return dataclasses.replace(upload, model=model, extra=extra)


def hide_clients(
    privacy: Privacy,
    uploads: list[Upload],
    global_model: State,
    keys: tuple[int, ...],
    min_count: int = 1,
) -> list[Upload]:
    """Unit client: every upload becomes the noised mean over all, and they differ no more.

    Whatever a method then makes of them, it makes of that mean alone. A class that exists is given
    the least count with which a method takes it for held, `min_count`. Noise is drawn from `keys`.
    """
    if privacy.unit != "client":
        return uploads
    ordered = sorted(uploads, key=lambda upload: upload.client)
    if privacy.clip is not None:
        model = noised_mean_model(
            global_model,
            [upload.model for upload in ordered],
            privacy.clip,
            privacy.noise,
            generator("update_noise", *keys),
        )
        uploads = [dataclasses.replace(u, model=model, num_samples=1) for u in uploads]
    if privacy.feature_clip is not None and ordered[0].extra:
        prototypes, exists = pooled_prototypes(
            torch.stack([upload.extra["prototypes"] for upload in ordered]),
            torch.stack([upload.extra["counts"] for upload in ordered]) >= min_count,
            privacy.feature_clip,
            privacy.prototype_noise,
            generator("prototype_noise", *keys),
        )
        extra = {"prototypes": prototypes, "counts": exists.to(prototypes) * min_count}
        uploads = [dataclasses.replace(upload, extra=extra) for upload in uploads]
    return uploads


class Release(NamedTuple):
    """Something noised that was let out `times` times, of data sampled at `rate` each time."""

    noise: float  # standard deviation over the largest change by one unit
    rate: float
    times: int


History = tuple[Release, ...]  # all that was released of one unit's data


def opacus(module: str) -> Any:
    """A module of Opacus, or what to do where it is missing."""
    try:
        return importlib.import_module(f"opacus.{module}")
    except ImportError:
        raise FedscError(
            "differential privacy needs Opacus, which is not installed: "
            "pip install 'fedsc[privacy]'"
        ) from None


@functools.lru_cache(maxsize=4096)
def renyi(
    noise: float, rate: float, orders: tuple[float, ...]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The Renyi divergence of one release, at every order."""
    with np.errstate(all="ignore"):
        found = opacus("accountants.analysis.rdp").compute_rdp(
            q=rate, noise_multiplier=noise, steps=1, orders=list(orders)
        )
    return np.asarray(found, dtype=np.float64)


def epsilon_of(
    history: Iterable[Release], delta: float, orders: tuple[float, ...] = ORDERS
) -> float:
    """The epsilon that belongs to `delta` after all these releases; infinite without noise."""
    released = [release for release in history if release.times]
    if any(release.noise <= 0 for release in released):
        return math.inf
    if not released:
        return 0.0
    each = [renyi(noise, rate, orders) * times for noise, rate, times in released]
    total = np.sum(each, axis=0)
    usable = np.isfinite(total)
    if not usable.any():
        return math.inf
    kept = [order for order, fine in zip(orders, usable, strict=True) if fine]
    with warnings.catch_warnings():
        # It warns where the best order is the first or the last: the bound holds all the same.
        warnings.simplefilter("ignore")
        epsilon, _ = opacus("accountants.analysis.rdp").get_privacy_spent(
            orders=kept, rdp=list(total[usable]), delta=delta
        )
    return max(0.0, float(epsilon))  # with much noise the conversion goes below


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a run releases of each unit's data, and when.

    `steps` (K,) and `rates` (K,): the steps of DP-SGD in a round and their sampling rate, by
    client. `surveys`: releases of prototypes before the first round.
    """

    privacy: Privacy
    rates: tuple[float, ...]
    steps: tuple[int, ...]
    cohorts: tuple[tuple[int, ...], ...]  # of each round
    sends_prototypes: bool
    surveys: bool

    def histories(self, round: int) -> set[History]:
        """The releases until the end of a round, of every client; equal ones once."""
        taken = np.zeros(len(self.rates), dtype=np.int64)
        for chosen in self.cohorts[:round]:
            taken[list(chosen)] += 1
        prototypes = taken.copy()
        if self.surveys and round:
            prototypes[list(self.cohorts[0])] += 1  # the survey asks the first round's clients
        # Unit record: sums and counts are two releases. Unit client: one vector holds both.
        vectors = 2 if self.privacy.unit == "record" else 1
        return {
            (
                Release(self.privacy.noise, rate, int(times) * steps),
                Release(
                    self.privacy.prototype_noise,
                    1.0,
                    vectors * int(shown) if self.sends_prototypes else 0,
                ),
            )
            for rate, steps, times, shown in zip(
                self.rates, self.steps, taken, prototypes, strict=True
            )
        }

    def spent(self, round: int) -> float:
        """Epsilon after a round, of the client for whom it is largest."""
        delta, most = self.privacy.delta, 0.0
        bounds = [(epsilon_of(h, delta, FEW_ORDERS), h) for h in self.histories(round)]
        for bound, history in sorted(bounds, reverse=True):
            if bound <= most:
                break  # so are all that follow
            most = max(most, epsilon_of(history, delta))
        return most


def with_noise(privacy: Privacy, noise: float, prototype_noise: float | None) -> Privacy:
    """The same mechanisms with other noise; prototypes get that of the weights if not their own."""
    own = noise if prototype_noise is None else prototype_noise
    if privacy.feature_clip is None:
        own = 0.0
    return dataclasses.replace(privacy, noise=noise, prototype_noise=own)


@functools.lru_cache(maxsize=8)  # a run is built once to be checked and once to be run
def solve_noise(ledger: Ledger, target: float, prototype_noise: float | None) -> Privacy:
    """The mechanisms with the least noise for which the whole run stays below a target epsilon."""

    def history_at(noise: float, history: History) -> History:
        weights, prototypes = history
        own = noise if prototype_noise is None else prototype_noise
        return weights._replace(noise=noise), prototypes._replace(noise=own)

    def spends(noise: float, history: History) -> float:
        return epsilon_of(history_at(noise, history), ledger.privacy.delta, FEW_ORDERS)

    found = LEAST_NOISE
    # The noise only grows on the way, so in the end it is enough for every history.
    for history in sorted(ledger.histories(len(ledger.cohorts))):
        least = spends(MOST_NOISE, history)
        if least > target:
            raise FedscError(
                f"no noise brings this run to --target-epsilon {target:g}: it spends {least:.3g} "
                "without its weights; take a larger target, more --dp-prototype-noise or fewer "
                "rounds"
            )
        if spends(found, history) <= target:
            continue
        low, high = found, 2 * found
        while spends(high, history) > target:
            low, high = high, 2 * high
        while high / low > 1.005:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if spends(middle, history) > target else (low, middle)
        found = high
    return with_noise(ledger.privacy, found, prototype_noise)


def steps_and_rates(
    sizes: Sequence[int], batch_size: int, epochs: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Steps of DP-SGD in a round and their sampling rate, by client."""
    batches = [min(batch_size, size) for size in sizes]
    pairs = list(zip(sizes, batches, strict=True))
    steps = tuple(epochs * steps_per_epoch(size, batch) for size, batch in pairs)
    return steps, tuple(batch / size for size, batch in pairs)


def make_ledger(
    spec: RunSpec,
    method: Method,
    model: nn.Module,
    sizes: Sequence[int],
    cohorts: tuple[tuple[int, ...], ...],
    say: Callable[[str], None],
) -> Ledger:
    """The mechanisms of a run, their noise solved for where that was asked.

    `sizes` are the clients' numbers of images, 0 for those on other machines; `cohorts` who takes
    part in each round.
    """
    privacy = Privacy(
        spec.dp_unit, spec.dp_clip, feature_clip=spec.dp_feature_clip, delta=spec.delta
    )
    refuse_unsound(privacy, method, model)
    here = [max(1, size) for size in sizes]
    steps, rates = steps_and_rates(here, spec.batch_size, spec.epochs)
    if spec.dp_unit == "client":  # of a client there is one update a round
        steps, rates = tuple(1 for _ in sizes), tuple(1.0 for _ in sizes)
    shows = bool(method.moments(1))
    ledger = Ledger(privacy, rates, steps, cohorts, shows, method.surveys_before_training())
    if spec.target_epsilon is None:
        privacy = with_noise(privacy, spec.dp_noise, spec.dp_prototype_noise)
        bare = [] if privacy.noise else ["weights"]
        bare += ["prototypes"] if shows and not privacy.prototype_noise else []
        if bare and (privacy.noise or privacy.prototype_noise):
            say(f"epsilon is infinite: {' and '.join(bare)} leave without noise")
    elif shows and privacy.feature_clip is None:
        raise FedscError(
            f"target_epsilon needs dp_feature_clip: {method.name} sends prototypes too"
        )
    else:
        say(f"looking for the noise that spends epsilon {spec.target_epsilon:g}")
        privacy = solve_noise(ledger, spec.target_epsilon, spec.dp_prototype_noise)
        say(f"noise {privacy.noise:.3g}, on prototypes {privacy.prototype_noise:.3g}")
    return dataclasses.replace(ledger, privacy=privacy)


# What can be private ------------------------------------------------------------------------------


def refuse_unsound(privacy: Privacy, method: Method, model: nn.Module) -> None:
    """Say so before training where the guarantee would not hold."""
    if privacy.clip is None and privacy.feature_clip is None:
        return
    # The class's own word: what holds for a method need not hold for one that is derived from it.
    units = vars(type(method)).get("private_units", ())
    if privacy.unit not in units:
        instead = f"; --dp-unit {units[0]} is possible" if units else ""
        if privacy.unit in method.private_units:
            instead = f"; if it is, name private_units in the class {type(method).__name__} itself"
        raise FedscError(
            f"{method.name} cannot be private with --dp-unit {privacy.unit}: what its clients "
            f"compute or send is not covered{instead}"
        )
    if privacy.unit == "client":
        if not method.shares_weights():
            raise FedscError(
                f"--dp-unit client protects the averaged model, and {method.name} here has none"
            )
        if privacy.clip is not None and has_batch_norm(model):
            raise FedscError(
                "BatchNorm's running variances do not stay positive under noise: take --norm group "
                "(or none) with --dp-unit client and --dp-clip"
            )
        return
    if not privacy.trains_privately:
        return
    others = [moment for moment in method.moments(1) if moment != "end"]
    if others:
        hint = f": take --method {method.name},private" if "private" in method.presets else ""
        raise FedscError(
            f"{method.name} gathers data while it trains (moment {', '.join(others)}), which ties "
            f"the records of a batch together; DP-SGD needs records one by one{hint}"
        )
    if method.logit_adjustment:
        raise FedscError(
            "logit_adjustment uses a client's class counts, which DP-SGD does not cover: leave "
            "it out with --dp-unit record and --dp-clip"
        )
    problems = opacus("validators").ModuleValidator.validate(model, strict=False)
    if has_batch_norm(model):
        raise FedscError(
            "BatchNorm mixes the records of a batch, so DP-SGD cannot clip them one by one: take "
            "--norm group (or none)"
        )
    if problems:
        raise FedscError(f"DP-SGD cannot train this model: {problems[0]}")


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())
