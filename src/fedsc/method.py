"""The contract of a federated method, and what its losses may see.

A method is a frozen dataclass: its fields are its hyperparameters, its methods are pure functions
over tensors. Every hook has a default, and all the defaults together are FedAvg; a method overrides
the few in which it differs. It never calls a model, an engine or a data set: the engine runs all
forward passes and hands over their outputs, so one method runs under plain autograd, in a captured
CUDA graph and across machines.

One round, with the hooks in the order they are called:

    server                                client k of the cohort
    broadcast(server)       --message-->  local_model, teachers (received model, memory)
                                          observe("start", ...)     clean pass, received model
                                          each epoch:
                                            observe("epoch", ...)   clean pass, current model
                                            each batch:
                                              observe("step", ...)  every training batch
                                              loss(batch)
                                              observe("last_epoch", ...)   only in the last epoch
                                          observe("end", ...)       clean pass, final model
    aggregate(server, uploads, records) <-  upload(result)
                                          remember(result)          the memory for next time
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import robust
from .errors import FedscError
from .models.outputs import Outputs
from .options import check, option
from .state import State

Moment = Literal["start", "epoch", "step", "last_epoch", "end"]


@dataclass(frozen=True)
class Task:
    """The fixed facts of a federation."""

    num_clients: int
    cohort_size: int  # clients that take part in a round
    num_classes: int
    feature_dim: int
    num_rounds: int
    seed: int = 0
    trainable: tuple[str, ...] = ()  # names of the adapted model's parameters


@dataclass(frozen=True)
class Client:
    """What a client knows of itself. The server learns of it only what `upload` sends."""

    id: Tensor  # () int64
    class_counts: Tensor  # (C,) float32: n_k^j
    memory: State  # what `remember` returned after its last participation, or `init_client`

    @property
    def class_shares(self) -> Tensor:
        """Of its samples, (C,). A class that it lacks counts as half a sample, to have a log."""
        counts = self.class_counts.clamp_min(0.5)
        return counts / counts.sum()


@dataclass(frozen=True)
class Batch:
    """One batch, with everything a loss or an observation may use."""

    labels: Tensor  # (B,) int64
    weight: Tensor  # (B,) float32: 0 for a sample that only fills up the last batch, else 1
    student: Outputs  # float32
    teachers: Mapping[str, Outputs]  # under no_grad, in evaluation mode
    params: Mapping[str, Tensor]  # the student's trainable tensors
    global_params: Mapping[str, Tensor]  # the same of the received model, constant
    received: State  # the server's message
    client: Client
    observed: Mapping[str, State]  # per moment, what `observe` has gathered so far this round


@dataclass(frozen=True)
class LocalResult:
    """What local training left behind."""

    model: State  # parameters and buffers
    losses: State  # mean of each term of the loss over the last epoch
    observed: Mapping[str, State]
    received: State
    client: Client


@dataclass(frozen=True)
class Upload:
    """What one client sends: its weights, its number of samples, and what its method adds."""

    client: int
    num_samples: int
    model: State
    extra: State = field(default_factory=dict)  # what `Method.upload` returned
    losses: State = field(default_factory=dict)  # for the record only, as is the next
    measures: State = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """The contract. Its defaults are FedAvg."""

    name: ClassVar[str]  # how the command line calls it
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # named sets of hyperparameters
    uses_stages: ClassVar[bool] = False  # whether its loss reads the outputs of the stages
    dataset_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # where they depend on it
    sent_prototypes: ClassVar[str | None] = None  # their name in what `upload` returns, if any
    # Units of differential privacy that hold. "record": the loss is a mean over samples, each term
    # of its own sample and what was received alone, and `upload` reads no data but the totals
    # `sums` and `counts`. "client": `upload` gives "prototypes" and "counts", or nothing. Not
    # inherited: a derived class names its own.
    private_units: ClassVar[tuple[str, ...]] = ()

    aggregation: Literal["samples", "uniform", "median", "trimmed_mean", "clipped_mean"] = option(
        "samples",
        "average the clients' weights by their number of samples, or all alike; robust: median or "
        "trimmed mean of each weight, or by samples with updates at most as long as the median one",
    )
    trim: float = option(
        0.3,
        "share of the clients that trimmed_mean leaves out at each end",
        at_least=0,
        at_most=0.5,
    )
    logit_adjustment: float = option(
        0.0, "adds this times log(share of the class at the client) to the logits of CE", at_least=0
    )

    def __post_init__(self) -> None:
        check(self)
        problem = self.conflict()
        if problem:
            raise FedscError(f"{self.name}: {problem}")

    def conflict(self) -> str | None:
        """What is wrong with hyperparameters that are each allowed but do not go together."""
        return None

    # The model -----------------------------------------------------------------------------------

    def adapt_model(self, model: nn.Module, task: Task) -> nn.Module:
        """The network this method trains, made from the common one."""
        return model

    # The server ----------------------------------------------------------------------------------

    def init_server(self, task: Task) -> State:
        """The server's memory beside the global model."""
        return {}

    def broadcast(self, server: State) -> State:
        """The message every client of the round receives, beside the global model."""
        return {}

    def aggregate(
        self, server: State, uploads: list[Upload], records: MutableMapping[int, State]
    ) -> State:
        """The server's new state, with the new global model under "model".

        `records` is what the server keeps of each client beyond the round. It may be large and lie
        on disk: read and write the records of the round's clients, one at a time.
        """
        return {**server, "model": self.average(uploads, server.get("model"))}

    def average(self, uploads: list[Upload], received: State | None = None) -> State:
        """The clients' weights made one, by `aggregation`; `received` is what they began with."""
        if self.aggregation in ("median", "trimmed_mean"):
            return self.middle([upload.model for upload in uploads])
        if self.aggregation == "clipped_mean":
            uploads = self.clip(uploads, received)
        uniform = self.aggregation == "uniform"
        return weighted_average(uploads, [1 if uniform else u.num_samples for u in uploads])

    @property
    def aggregates_robustly(self) -> bool:
        """Whether `aggregation` is one of the rules that bound what a single client can do."""
        return self.aggregation not in ("samples", "uniform")

    def middle(self, models: list[State]) -> State:
        """The median or the trimmed mean of models."""
        if self.aggregation == "median":
            return robust.combine(models, robust.coordinate_median)
        return robust.combine(models, lambda values: robust.trimmed_mean(values, self.trim))

    def clip(self, uploads: list[Upload], received: State | None) -> list[Upload]:
        """The uploads with no update longer than the median one."""
        if received is None:
            raise FedscError(
                f"{self.name}: aggregation=clipped_mean needs the model the clients received: "
                'call average(uploads, server["model"])'
            )
        models = robust.clip_updates([upload.model for upload in uploads], received)
        return [replace(u, model=model) for u, model in zip(uploads, models, strict=True)]

    def diagnostics(self, server: State, uploads: list[Upload]) -> dict[str, float]:
        """Numbers worth a place in the record of the round."""
        return {}

    # The client ----------------------------------------------------------------------------------

    def init_client(self, task: Task) -> State:
        """A client's memory before its first participation."""
        return {}

    def local_model(self, received_model: State, memory: State) -> State:
        """The weights a client starts its round with."""
        return received_model

    def teachers(self, received_model: State, memory: State) -> Mapping[str, State]:
        """Weights of the frozen models to run beside the student, by name."""
        return {}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The terms of the loss, by name, already weighted; their sum is minimised."""
        return {"ce": self.cross_entropy(batch)}

    def cross_entropy(self, batch: Batch, reduction: str = "mean") -> Tensor:
        """Of the student's classifier.

        With logit adjustment (Menon et al. 2021; in federated learning FedLC, Zhang et al. 2022)
        a client's many samples of a class no longer push all other classes down.
        """
        logits = batch.student.logits
        if self.logit_adjustment:
            logits = logits + self.logit_adjustment * batch.client.class_shares.log()
        return F.cross_entropy(logits, batch.labels, reduction=reduction)

    def moments(self, round: int) -> tuple[Moment, ...]:
        """When this round calls `observe`. A clean pass costs a third of an epoch."""
        return ()

    def start_observing(self, moment: Moment, task: Task) -> State:
        """The totals before the first batch of a pass: tensors of fixed shape."""
        return {}

    def observe(self, moment: Moment, batch: Batch, totals: State) -> State:
        """The totals after one more batch. Runs under no_grad."""
        return totals

    def upload(self, result: LocalResult) -> State:
        """What the client sends beside its weights."""
        return {}

    def measure(self, result: LocalResult) -> State:
        """Scalars for the record of the round (`diagnostics` finds them in the uploads)."""
        return {}

    def remember(self, result: LocalResult) -> State:
        """The client's memory after this round."""
        return result.client.memory

    # Evaluation ----------------------------------------------------------------------------------

    def surveys_before_training(self) -> bool:
        """Whether a round 0 without training gathers prototypes of the initial model."""
        return False

    def shares_weights(self) -> bool:
        """Whether the clients' weights travel at all."""
        return True

    def evaluated_models(self, server: State, memories: Mapping[int, State]) -> Iterator[State]:
        """The models to measure; results are averaged over what `predictions` makes of them."""
        yield server["model"]

    def predictions(self, outputs: list[Outputs], server: State) -> list[Tensor]:
        """Scores (N, C) of the test images, from the outputs of the evaluated models."""
        return [output.logits for output in outputs]

    def embedding(self, features: Tensor) -> Tensor:
        """The features (N, d) as few-shot episodes compare them."""
        return features

    def prototypes(self, server: State) -> tuple[Tensor, Tensor] | None:
        """The class prototypes (C, d) and which exist (C,), for nearest-prototype accuracy."""
        return None


def tested_model(method: Method, server: State) -> State:
    """The global model as it is tested and handed out, which is not always what clients receive."""
    return next(method.evaluated_models(server, {}), server["model"])


def weighted_average(uploads: list[Upload], weights: list[float]) -> State:
    """The weighted mean of the clients' models, BatchNorm's running statistics included.

    Integer tensors (BatchNorm's batch counter) cannot be averaged: the largest is kept. Clients are
    summed in the order of their ids, so the result does not depend on who answered first.
    """
    total = float(sum(weights))
    pairs = sorted(zip(uploads, weights, strict=True), key=lambda pair: pair[0].client)
    mean: State = {}
    for name, first in uploads[0].model.items():
        if first.is_floating_point():
            mean[name] = torch.zeros_like(first)
        else:
            mean[name] = torch.stack([u.model[name] for u, _ in pairs]).amax(0)
    floats = [name for name, tensor in mean.items() if tensor.is_floating_point()]
    sums = [mean[name] for name in floats]
    for upload, weight in pairs if sums else ():
        torch._foreach_add_(sums, [upload.model[name] for name in floats], alpha=weight / total)
    return mean
