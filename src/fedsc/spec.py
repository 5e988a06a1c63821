"""The specification of a run: everything that decides its result, as one flat set of options."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from .data.partition import NID2_CLIENTS
from .errors import FedscError, unknown
from .files import read_text
from .options import check, option, options_of


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run. The defaults are the paper's, on the embedded data set."""

    dataset: str = option(
        "digits",
        "digits, fashion-mnist, cifar10, cifar100, tinyimagenet, fc100, folder:PATH or npz:PATH",
    )
    method: str = option("fedsc", "a method with options: fedsc, fedsc,literal or fedsc,tau=0.1")
    seed: int = option(
        0,
        "fixes partition, cohorts, batches, augmentation and first weights",
        at_least=0,
        at_most=2**53,
    )

    partition: str = option(
        "nid1:0.2",
        "iid, nid1:ALPHA[:plain|equal|client], nid2[:half|extra] or shards:N; "
        "`fedsc data show` draws it",
    )
    clients: int | None = option(None, "number of clients (default: 10, or 6 for nid2)", at_least=1)
    participation: float = option(
        1.0, "share of the clients that take part in a round", above=0, at_most=1
    )
    long_tail: float | None = option(
        None, "ratio rho of the largest to the smallest class", at_least=1
    )
    train_limit: int | None = option(None, "use this many training images only", at_least=1)
    validation: int | None = option(
        None,
        "hold out this many training images, and test on them: for choosing hyperparameters",
        at_least=1,
    )

    model: str = option("auto", "auto, mlp, cnn, conv4, resnet10, mobilenetv2 or FILE.py:CLASS")
    norm: Literal["auto", "batch", "fixed", "group", "none"] = option(
        "auto",
        "normalisation layers of the model; fixed: BatchNorm that is fixed halfway",
    )

    rounds: int = option(100, "communication rounds R", at_least=1)
    epochs: int = option(10, "local epochs E", at_least=1)
    batch_size: int = option(64, "images per local step", at_least=1)
    lr: float = option(0.01, "learning rate of the clients' SGD", above=0)
    momentum: float = option(0.9, "momentum of the clients' SGD", at_least=0, at_most=1)
    weight_decay: float = option(1e-5, "weight decay of the clients' SGD", at_least=0)
    clip_norm: float | None = option(
        None, "largest norm of a step's gradient (default: no limit)", above=0
    )
    augment: Literal["auto", "none", "crop-flip", "crop-flip-batch"] = option(
        "auto",
        "training images: as they are, or cropped and flipped at random, each for itself or a "
        "whole batch alike",
    )

    dropout: float = option(
        0.0, "chance that a client of the round is not there", at_least=0, at_most=1
    )
    straggler: float = option(
        0.0, "chance that a client's upload comes too late and is lost", at_least=0, at_most=1
    )
    min_clients: int = option(
        0,
        "stop when a round has fewer usable uploads; 0: go on, a round without any changes nothing",
        at_least=0,
    )

    few_shot: int | None = option(
        None, "hold out this many classes for few-shot episodes (fc100: always 20)", at_least=2
    )
    episodes: int = option(600, "few-shot test episodes", at_least=1)
    ways: int = option(5, "classes in an episode", at_least=2)
    shots: int = option(5, "support images per class", at_least=1)
    queries: int = option(15, "query images per class", at_least=1)

    calibrated: bool = option(
        False,
        "measure besides by the discriminant of fedsc+ (`calibrated` in the records) and by its "
        "sum with the classifier (`summed`)",
    )

    attack: Literal["label-flip", "sign-flip", "scaled-update", "poisoned-prototypes"] | None = (
        option(None, "harm that --attackers do, to test robust options with")
    )
    attackers: float | None = option(
        None, "share of the clients that attack, chosen by the seed", at_least=0, at_most=1
    )
    dp_unit: Literal["none", "record", "client"] = option(
        "none", "differential privacy for one record of a client, or for a whole client"
    )
    dp_clip: float | None = option(
        None, "L2 bound of a record's gradient (unit record) or a client's update", above=0
    )
    dp_noise: float = option(0.0, "noise on the weights, in units of dp_clip", at_least=0)
    dp_feature_clip: float | None = option(
        None, "L2 bound of each feature (unit client: of each prototype)", above=0
    )
    dp_prototype_noise: float | None = option(
        None,
        "noise on prototypes, in units of dp_feature_clip, and on counts (default: dp_noise)",
        at_least=0,
    )
    target_epsilon: float | None = option(
        None, "find the noise with which the whole run spends this much", above=0
    )
    delta: float = option(1e-5, "delta of the spent epsilon", above=0, at_most=0.1)

    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    engine: Literal["auto", "sequential", "workers", "graphs"] = option(
        "auto",
        "one client after another, or several at once, in CPU processes or CUDA graphs; "
        "auto: by device",
    )
    slots: int | None = option(
        None, "clients at once in the graph engine (default: 8 on Hopper GPUs, else 5)", at_least=1
    )
    compile: bool = option(True, "compile the model before the graph engine captures it")
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "of the forward pass, losses are always fp32; auto: bf16 in CUDA graphs, else fp32"
    )
    client_memory: float = option(
        4.0, "GiB of clients' states kept in memory; the rest lies on disk", above=0
    )
    threads: int | None = option(
        None, "CPU threads (default: PyTorch's choice)", at_least=1, at_most=1024
    )

    def __post_init__(self) -> None:
        check(self)
        if self.attack and self.attackers is None:
            raise FedscError(f"--attack {self.attack} needs --attackers, a share such as 0.3")
        if self.attackers and not self.attack:
            raise FedscError(f"--attackers {self.attackers:g} needs --attack, such as sign-flip")
        self._check_privacy()

    def _check_privacy(self) -> None:
        """Options of differential privacy that do not go together."""
        bounds = {"dp_clip": self.dp_clip, "dp_feature_clip": self.dp_feature_clip}
        noise = {"dp_noise": self.dp_noise, "dp_prototype_noise": self.dp_prototype_noise}
        asked = {**bounds, **noise, "target_epsilon": self.target_epsilon}
        given = [name for name, value in asked.items() if value]
        if given and self.dp_unit == "none":
            raise FedscError(f"{given[0]} needs dp_unit: record or client")
        for (bound, limit), (name, amount) in zip(bounds.items(), noise.items(), strict=True):
            if amount and limit is None:
                raise FedscError(
                    f"{name} = {amount:g} needs {bound}: noise without a bound on what "
                    "it hides protects nothing"
                )
        if self.target_epsilon is not None and self.dp_noise:
            raise FedscError("target_epsilon finds dp_noise: give one of the two")
        if self.target_epsilon is not None and self.dp_clip is None:
            raise FedscError("target_epsilon needs dp_clip: weights leave the clients too")
        if self.calibrated and self.dp_unit != "none":
            raise FedscError(
                f"calibrated does not go with dp_unit = {self.dp_unit}: no noise hides its "
                "statistics; leave one of the two out"
            )

    @property
    def num_clients(self) -> int:
        if self.clients is not None:
            return self.clients
        return NID2_CLIENTS if self.partition.split(":")[0] == "nid2" else 10


# Where a run was computed, how its method was spelt and what was measured besides do not change
# which run it is.
NOT_PART_OF_THE_HASH = (
    "device",
    "threads",
    "client_memory",
    "engine",
    "slots",
    "compile",
    "label",
    "calibrated",
)


def spec_hash(resolved: dict[str, Any]) -> str:
    """The identity of a run: 12 hex digits over what decides its result."""
    kept = {k: v for k, v in resolved.items() if k not in NOT_PART_OF_THE_HASH}
    text = json.dumps(kept, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


COMMAND_LINE_ONLY = ("out", "overwrite", "resume", "track", "data_dir", "quiet", "config")


def read_config(path: Path) -> dict[str, Any]:
    """The options in a TOML file: the names of RunSpec's fields, and `methods` and `seeds`."""
    try:
        found = tomllib.loads(read_text(path))
    except OSError as error:
        raise FedscError(f"cannot read {path}: {error.strerror}") from None
    except FedscError:
        raise
    except (ValueError, RecursionError) as error:
        raise FedscError(f"{path} is not valid TOML: {error}") from None
    allowed = [opt.name for opt in options_of(RunSpec)] + ["methods", "seeds"]
    for name in found:
        if name.replace("-", "_") in COMMAND_LINE_ONLY:
            flag = "--" + name.replace("_", "-")
            raise FedscError(f"{name} in {path} is no option of a run: give {flag} beside --config")
        if name not in allowed:
            raise unknown(f"option in {path}", name, allowed)
    for name, several in (("method", "methods"), ("seed", "seeds")):
        if isinstance(found.get(name), list):
            raise FedscError(f"{name} = {found[name]!r} in {path} is a list: write {several} = ...")
        if name in found and several in found:
            raise FedscError(f"{path} has both {name} and {several}: leave one of them out")
    for name, kind in (("methods", str), ("seeds", int)):
        values = found.get(name, [])
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            example = {"methods": '["fedavg", "fedsc"]', "seeds": "[0, 1]"}[name]
            raise FedscError(f"{name} = {values!r} in {path} is not a list such as {example}")
        if name in found and not values:
            raise FedscError(f"{name} in {path} is empty: give at least one, or leave {name} out")
    return found
