"""The round loop: plan, broadcast, fit, aggregate, evaluate, record."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attacks import attacked, choose_attackers, flip_labels
from .calibration import (
    SMOOTHING,
    add_statistics,
    empty_statistics,
    linear_discriminant,
    smoothed,
)
from .contract import (
    check_class,
    given_aggregate,
    given_moments,
    given_network,
    given_numbers,
    given_state,
)
from .data.dataset import Dataset
from .data.episodes import draw_episodes
from .data.partition import Indices, class_count_table, partition
from .data.plan import cohort, cohort_size
from .data.subset import first_of_each_class, long_tail
from .engines.graphs import CannotCaptureError, GraphEngine
from .engines.local import (
    ClientData,
    Engine,
    OnImages,
    Precision,
    Training,
    channels_last,
    copy_state,
    load_state,
)
from .engines.sequential import SequentialEngine
from .engines.workers import WorkerEngine, can_fork
from .errors import FedscError
from .evaluation import (
    EVALUATION_BATCH,
    accuracy,
    evaluate,
    evaluate_few_shot,
    run_model,
)
from .faults import Answers, TooFewClientsError, draw_faults, find_unusable, usually_sent
from .method import Method, Task, Upload
from .models import check_model
from .models.outputs import Outputs
from .privacy import Ledger, hide_clients, make_ledger, saying_nothing
from .spec import RunSpec, spec_hash
from .state import State, layout, num_bytes, to_device
from .store import ClientStore

Record = dict[str, Any]


def split_training_data(spec: RunSpec, data: Dataset) -> list[Indices]:
    """The clients' indices into the training images: limit, then long tail, then partition."""
    labels = data.train_labels.cpu().numpy()
    kept = np.arange(len(labels))
    if spec.train_limit is not None:
        kept = kept[first_of_each_class(labels, spec.train_limit)]
    if spec.long_tail is not None:
        kept = kept[long_tail(labels[kept], spec.long_tail, spec.seed)]
    parts = partition(spec.partition, labels[kept], spec.num_clients, spec.seed)
    return [kept[part] for part in parts]


EngineName = Literal["sequential", "workers", "graphs"]


def choose_engine(
    spec: RunSpec, device: torch.device, cohort_size: int
) -> tuple[EngineName, Precision]:
    """The engine and the precision of a run, where the specification leaves them open."""
    on_gpu = device.type == "cuda"
    engine: EngineName
    if spec.engine != "auto":
        engine = spec.engine
    elif on_gpu:
        engine = "graphs"
    elif min(cohort_size, torch.get_num_threads()) > 1 and can_fork():
        engine = "workers"
    else:
        engine = "sequential"
    if spec.dp_unit == "record" and engine == "graphs":
        if spec.engine == "graphs":
            raise FedscError("--engine graphs cannot do --dp-unit record: take --engine sequential")
        engine = "sequential"
    if engine == "workers" and on_gpu:
        raise FedscError("--engine workers is for the CPU: leave it out, or add --device cpu")
    if engine == "workers" and not can_fork():
        raise FedscError(
            "--engine workers needs Linux, outside a daemon process: take --engine sequential"
        )
    if spec.precision != "auto":
        return engine, spec.precision
    return engine, "bf16" if on_gpu and engine == "graphs" else "fp32"


class Federation:
    """A server and its clients, ready to run; `rounds()` runs it and yields a record a round.

    Layers that a method adds to the model (FedNH's head) are drawn from PyTorch's own generator:
    for the same numbers seed it first, as `fedsc.run` does.
    """

    def __init__(
        self,
        spec: RunSpec,
        data: Dataset,
        method: Method,
        model: nn.Module,
        on_images: OnImages = lambda number: None,
        client_folder: Path | None = None,
        parts: list[Indices] | None = None,
    ) -> None:
        check_class(type(method))
        self.device = device = data.train_images.device
        self.spec, self.data, self.method, self.on_images = spec, data, method, on_images
        self.parts = split_training_data(spec, data) if parts is None else parts
        labels = data.train_labels.cpu().numpy()
        counts = class_count_table(labels, self.parts, data.num_classes)
        self.class_counts = torch.from_numpy(counts)  # (K, C)
        self.attackers = choose_attackers(spec.seed, spec.num_clients, spec.attackers or 0.0)
        if spec.attack == "poisoned-prototypes" and method.sent_prototypes is None:
            raise FedscError(
                f"{method.name} sends no prototypes that an attacker could poison: take another "
                "--attack, or fedsc, fedsc+, fedproto or fednh"
            )
        self._check_calibrated()
        self.local_data = self._data_as_trained_on()
        labels = self.local_data.train_labels.cpu().numpy()
        local_counts = torch.from_numpy(class_count_table(labels, self.parts, data.num_classes))
        self.clients = [
            ClientData(k, torch.from_numpy(part).to(device), row.float().to(device))
            for k, (part, row) in enumerate(zip(self.parts, local_counts, strict=True))
        ]

        feature_dim = check_model(model, data.image_shape, data.num_classes)
        size = cohort_size(spec.num_clients, spec.participation)
        if spec.min_clients > size:
            raise FedscError(
                f"min_clients = {spec.min_clients}: a round has {size} clients only (allowed: 0 to "
                f"{size}); lower it, or raise --participation"
            )
        task = Task(spec.num_clients, size, data.num_classes, feature_dim, spec.rounds, spec.seed)
        network = given_network(method, method.adapt_model(model, task))
        self.model = channels_last(network.to(device))
        # The method may have changed the network: ask it again what it gives.
        feature_dim = check_model(self.model, data.image_shape, data.num_classes)
        names = tuple(name for name, p in self.model.named_parameters() if p.requires_grad)
        self.task = dataclasses.replace(task, feature_dim=feature_dim, trainable=names)
        self._check_single_samples()
        self.ledger = self._make_ledger()
        self.noise_key = self._make_noise_key()
        self.engine_name: str
        self.engine_name, self.precision = choose_engine(spec, device, size)
        self.engine: Engine = self._make_engine()
        self.episodes = (
            draw_episodes(data.test_labels, spec.episodes, spec.ways, spec.shots, spec.queries)
            if data.few_shot
            else None
        )
        # Once before there is an engine, which makes room for what these two give.
        given_moments(method, method.moments(1))
        given_state(method, "init_client", method.init_client(self.task))
        own_state = given_state(method, "init_server", method.init_server(self.task))
        self.server: State = {**to_device(own_state, device), "model": copy_state(self.model)}
        self.initial_layout = layout(self.server)
        if spec.calibrated:  # beside the method's own state, so that checkpoints hold it
            self.server["calibration"] = to_device(empty_statistics(self.task), device)
        limit = int(spec.client_memory * 2**30)
        self.memories = ClientStore("memory", limit, client_folder)  # the clients' own
        self.records = ClientStore("record", limit, client_folder)  # what the server keeps of them
        self.round = 0  # rounds finished
        self.has_diverged = self.has_rejected = False

    def _data_as_trained_on(self) -> Dataset:
        """The data set, with other labels where attackers flip them."""
        data = self.data
        if self.spec.attack != "label-flip" or not self.attackers:
            return data
        labels = data.train_labels.clone()
        own = torch.from_numpy(np.concatenate([self.parts[k] for k in self.attackers]))
        own = own.to(labels.device)
        labels[own] = flip_labels(labels[own], data.num_classes)
        return dataclasses.replace(data, train_labels=labels)

    def _make_engine(self) -> SequentialEngine | WorkerEngine | GraphEngine:
        spec = self.spec
        augment = self.data.augment if spec.augment == "auto" else spec.augment
        training = Training(
            seed=spec.seed,
            epochs=spec.epochs,
            batch_size=spec.batch_size,
            lr=spec.lr,
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            clip_norm=spec.clip_norm,
            augment=augment,
            precision=self.precision,
            privacy=self.ledger.privacy,
            noise_key=self.noise_key,
        )
        common = self.method, self.model, self.task, self.local_data, training
        if self.engine_name == "sequential":
            return SequentialEngine(*common)
        if self.engine_name == "workers":
            at_once = min(self.task.cohort_size, torch.get_num_threads())
            return WorkerEngine(SequentialEngine(*common), self.clients, at_once)
        devices = [self.device]
        if spec.device in ("auto", "cuda") and self.device.type == "cuda":
            devices = [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
        sizes = [client.num_samples for client in self.clients if client.num_samples]
        return GraphEngine(*common, sizes, devices, spec.slots, spec.compile, self.say)

    def _make_ledger(self) -> Ledger:
        spec, number = self.spec, (self.task.num_clients, self.task.cohort_size)
        rounds = range(1, spec.rounds + 1) if spec.dp_unit != "none" else ()
        cohorts = tuple(tuple(cohort(spec.seed, round, *number)) for round in rounds)
        sizes = [client.num_samples for client in self.clients]
        return make_ledger(spec, self.method, self.model, sizes, cohorts, self.say)

    def _make_noise_key(self) -> int:
        """A number of this run: two with the same noise would have none in their difference."""
        if self.spec.dp_unit == "none":
            return 0
        method = {"name": self.method.name, **dataclasses.asdict(self.method)}
        return int(spec_hash({**dataclasses.asdict(self.spec), "method": method}), 16)

    def images_per_round(self) -> int:
        """Images a round trains on, for a cohort of average size."""
        total = sum(client.num_samples for client in self.clients)
        return total * self.spec.epochs * self.task.cohort_size // self.task.num_clients

    def rounds(self) -> Iterator[Record]:
        """Run the rounds that are left."""
        if self.round == 0 and self.method.surveys_before_training():
            chosen = cohort(self.spec.seed, 1, self.task.num_clients, self.task.cohort_size)
            uploads = self.fit(0, chosen)
            if uploads:
                before = self.server
                surveyed = self.aggregate(self.hidden(uploads, 0))
                self.server = {**surveyed, "model": before["model"]}
                self.gather_statistics(before, uploads)
        while self.round < self.spec.rounds:
            record = self.run_round(self.round + 1)
            self.round += 1
            yield record

    def run_round(self, round: int) -> Record:
        started = time.perf_counter()
        chosen = cohort(self.spec.seed, round, self.task.num_clients, self.task.cohort_size)
        message_bytes = num_bytes(self.message())
        answers = self.collect(round, chosen)
        uploads = answers.uploads
        fitted = time.perf_counter()
        before = self.server
        if uploads:
            self.server = self.aggregate(self.hidden(uploads, round))
        aggregated = time.perf_counter()
        self.gather_statistics(before, uploads)
        measured = self.evaluate()
        ended = time.perf_counter()

        model_bytes = num_bytes(self.server["model"]) if self.method.shares_weights() else 0
        images = sum(upload.num_samples for upload in answers.received) * self.spec.epochs
        losses = mean_losses(answers.sound or answers.received)
        asked = [k for k in chosen if k not in answers.dropped]
        left_out = sorted(set(asked) - {upload.client for upload in answers.received})  # on Flower
        none_is_left = bool(answers.rejected) and not answers.sound
        diverged = none_is_left or not all(map(math.isfinite, losses.values()))
        if diverged and not self.has_diverged:
            self.has_diverged = True
            self.say(f"{self.spec.method} has diverged in round {round}: try a smaller --lr")
        record = {
            "round": round,
            **measured,
            "train_loss": losses,
            **({"diverged": True} if diverged else {}),
            **({} if self.spec.dp_unit == "none" else {"epsilon": self.ledger.spent(round)}),
            **(self.diagnostics(answers.sound) if answers.sound else {}),
            "cohort": chosen,
            **({"left_out": left_out} if left_out else {}),
            **answers.record(),
            **self._robust_record(chosen),
            "bytes_down": len(asked) * (model_bytes + message_bytes),
            "bytes_up": sum(model_bytes + num_bytes(upload.extra) for upload in answers.received),
            "timing": {
                "seconds": ended - started,
                "fit_seconds": fitted - started,
                "aggregate_seconds": aggregated - fitted,
                "evaluate_seconds": ended - aggregated,
                "images_per_second": images / (fitted - started),
            },
        }
        return {name: _finite(value) for name, value in record.items()}

    def fit(self, round: int, chosen: list[int]) -> list[Upload]:
        """The uploads of a round that can be used."""
        return self.collect(round, chosen).uploads

    def collect(self, round: int, chosen: list[int]) -> Answers:
        """Have the chosen clients train, and sort what comes back."""
        spec = self.spec
        chances = spec.dropout, spec.straggler
        dropped, late = draw_faults(spec.seed, round, self.task.num_clients, *chances)
        results = self.train(round, [k for k in chosen if k not in dropped])
        received = [upload for upload, _ in results]
        in_time = [upload for upload in received if upload.client not in late]
        hidden = self.ledger.privacy.hides_updates  # and clipped, so none is too long
        unusable = find_unusable(received, self.server["model"], any_length=hidden)
        rejected = {k: reason for k, reason in unusable.items() if k not in late}
        uploads = [upload for upload in in_time if upload.client not in rejected]
        if hidden and rejected:
            model, usual = self.server["model"], usually_sent(received)
            uploads = [
                saying_nothing(upload, model, usual) if upload.client in rejected else upload
                for upload in in_time
            ]
        answers = Answers(
            uploads=uploads,
            dropped=[k for k in chosen if k in dropped],
            late=[upload.client for upload in received if upload.client in late],
            rejected=rejected,
            received=received,
        )
        if rejected and not self.has_rejected:
            self.has_rejected = True
            client, reason = next(iter(rejected.items()))
            self.say(
                f"{spec.method}: client {client}'s upload is rejected in round {round}, {reason}; "
                "this and others are in the records of the rounds"
            )
        if len(answers.uploads) < spec.min_clients:
            raise TooFewClientsError(round, answers, spec.min_clients)
        for upload, memory in results:
            if memory and upload.client not in unusable:
                self.memories[upload.client] = memory
        return answers

    def train(self, round: int, chosen: list[int]) -> list[tuple[Upload, State]]:
        """Broadcast to the chosen clients, and train them; each one's upload and new memory."""
        if not chosen:
            return []
        message = self.message()
        clients = [self.clients[k] for k in chosen]
        arguments = round, clients, self.server["model"], message, self.memory_of, self.on_images
        try:
            results = list(self.engine.fit(*arguments))
        except CannotCaptureError as error:
            self.say(f"cannot capture this step in a graph, going on one by one: {error}")
            self.engine_name = "sequential"
            self.engine = self._make_engine()
            results = list(self.engine.fit(*arguments))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # once a round, so that its timing is true
        return [(self._as_sent(upload), memory) for upload, memory in results]

    def message(self) -> State:
        """What all clients of a round receive beside the model."""
        return given_state(self.method, "broadcast", self.method.broadcast(self.server))

    def hidden(self, uploads: list[Upload], round: int) -> list[Upload]:
        """The uploads as the method's server may see them."""
        privacy, model = self.ledger.privacy, self.server["model"]
        keys = self.spec.seed, self.noise_key, round
        return hide_clients(privacy, uploads, model, keys, self._min_count())

    def _min_count(self) -> int:
        """The samples of a class with which a client has a prototype of it."""
        return int(getattr(self.method, "min_count", 1))  # who sends none has no such limit

    def aggregate(self, uploads: list[Upload]) -> State:
        """The server's state after these uploads."""
        new = self.method.aggregate(self.server, uploads, self.records)
        return given_aggregate(self.method, new, self.initial_layout)

    def diagnostics(self, uploads: list[Upload]) -> dict[str, float]:
        found = self.method.diagnostics(self.server, uploads)
        return given_numbers(self.method, "diagnostics", found)

    def _as_sent(self, upload: Upload) -> Upload:
        """An upload as the server gets it: an attacker's is not what training left."""
        if self.spec.attack is None or upload.client not in self.attackers:
            return upload
        key = self.method.sent_prototypes
        return attacked(self.spec.attack, upload, self.server["model"], key)

    def _robust_record(self, chosen: list[int]) -> Record:
        """Who attacked and which robust rule was in force, in rounds where there was any."""
        record: Record = {}
        if self.spec.attack is not None:
            record["attackers"] = [client for client in chosen if client in self.attackers]
        if self.method.aggregates_robustly:
            record["aggregation"] = self.method.aggregation
        return record

    def say(self, line: str) -> None:
        """Something the user should know, once."""
        print(f"fedsc: {line}", file=sys.stderr, flush=True)

    def memory_of(self, client: int) -> State:
        known = client in self.memories
        return self.memories[client] if known else self.method.init_client(self.task)

    def evaluate(self) -> Record:
        """Measure the global model, or where there is none the clients', on the test set."""
        models = self.method.evaluated_models(self.server, self.memories)
        first = next(models, self.server["model"])  # nobody has a model of its own yet
        each = map(self._test_outputs, itertools.chain([first], models))
        if self.episodes is not None:
            return mean_records(
                evaluate_few_shot(self.method.embedding(output.features), self.episodes)
                for output in each
            )
        if self.method.shares_weights():
            outputs, prototypes = list(each), self.method.prototypes(self.server)
        else:  # a model per client: no features are "the" features, and all would be many
            outputs = [output._replace(features=output.features[:0]) for output in each]
            prototypes = None
        long_tailed = self.spec.long_tail is not None
        found = mean_records(
            evaluate(
                scores, outputs[0].features, self.data, self.class_counts, prototypes, long_tailed
            )
            for scores in self.method.predictions(outputs, self.server)
        )
        if self.spec.calibrated and bool(self.server["calibration"]["class_counts"].any()):
            found |= self._calibrated(outputs[0], first is self.server["model"])
        return found

    def _calibrated(self, tested: Outputs, is_averaged: bool) -> Record:
        """Measurements of the global model's features by other classifiers than the one tested."""
        averaged = tested if is_averaged else self._test_outputs(self.server["model"])
        labels, statistics = self.data.test_labels, self.server["calibration"]
        found = {"averaged": averaged.logits} if not is_averaged else {}
        found["calibrated"] = F.linear(averaged.features, *linear_discriminant(statistics))
        found["summed"] = averaged.logits + found["calibrated"]
        return {name: accuracy(scores, labels) for name, scores in found.items()}

    def gather_statistics(self, before: State, uploads: list[Upload]) -> None:
        """What the round's clients would send for calibration, as those of fedsc+ do: of the model
        they received, which `before`, the server before the round, still has.

        It is measured here and not by the engine: for it no client trains, sends or counts more.
        """
        if not self.spec.calibrated:
            return
        statistics = before["calibration"]
        if uploads:
            used = sorted(upload.client for upload in uploads)
            indices = torch.cat([self._enough_of_a_class(client) for client in used])
            statistics = smoothed(statistics, self._statistics(before["model"], indices), SMOOTHING)
        self.server = {**self.server, "calibration": statistics}

    def _enough_of_a_class(self, client: int) -> Tensor:
        """The client's images but for classes of which it has too few, as for prototypes."""
        own = self.clients[client]
        enough = own.class_counts[self.engine.images.labels[own.indices]] >= self._min_count()
        return own.indices[enough]

    def _statistics(self, model: State, indices: Tensor) -> State:
        load_state(self.model, model)
        totals = to_device(empty_statistics(self.task), self.device)
        size = EVALUATION_BATCH[self.device.type]
        batches = self.engine.images.clean_batches(indices, size) if len(indices) else ()
        for batch, labels in batches:
            once = torch.ones(len(labels), device=self.device)
            totals = add_statistics(totals, self._outputs([batch]).features, labels, once)
        return totals

    def _test_outputs(self, state: State) -> Outputs:
        load_state(self.model, state)
        return self._outputs(self.engine.images.test_batches(EVALUATION_BATCH[self.device.type]))

    def _outputs(self, batches: Iterable[Tensor]) -> Outputs:
        forward = self.engine.images.forward
        return run_model(lambda batch: forward(self.model, batch), self.model, batches)

    def _check_calibrated(self) -> None:
        """Calibration is of one global model, and of the classes it was trained on."""
        if not self.spec.calibrated:
            return
        if not self.method.shares_weights():
            raise FedscError(
                f"--calibrated needs a global model, and {self.spec.method} has one per client: "
                "leave it out, or take a form of the method that shares weights"
            )
        if self.data.few_shot:
            raise FedscError(
                "--calibrated needs test images of the classes trained on, and few-shot episodes "
                "have others: leave it out"
            )

    def _check_single_samples(self) -> None:
        """Batch normalisation has no variance over one value: say so before training starts."""
        here = [client for client in self.clients if client.num_samples]  # on Flower not all are
        smallest = min(here, key=lambda client: client.num_samples, default=None)
        if smallest is None or min(smallest.num_samples, self.spec.batch_size) > 1:
            return
        image = self.data.train_images[:1].float()
        try:
            with torch.no_grad():
                copy.deepcopy(self.model).train()(image)
        except ValueError as error:
            raise FedscError(
                f"client {smallest.id} trains on batches of one image, which this model cannot "
                f"({error}): take another norm, a larger batch size or fewer clients"
            ) from None


def mean_losses(uploads: list[Upload]) -> dict[str, float]:
    """Each term of the loss, averaged over clients by their samples."""
    if not uploads:
        return {}
    total = sum(upload.num_samples for upload in uploads)
    return {
        name: sum(float(u.losses[name]) * u.num_samples for u in uploads) / total
        for name in uploads[0].losses
        if all(name in u.losses for u in uploads)  # a node may send what it likes
    }


def mean_records(records: Iterable[Record]) -> Record:
    """The mean of each measurement over several evaluations of the same round."""
    found = list(records)
    if len(found) == 1:
        return found[0]
    return {name: _mean([record[name] for record in found]) for name in found[0]}


def _mean(values: list[Any]) -> Any:
    """Of numbers, or of lists of numbers; what is missing stays missing."""
    if isinstance(values[0], list):
        return [_mean(list(column)) for column in zip(*values, strict=True)]
    return None if None in values else sum(values) / len(values)


def _finite(value: Any) -> Any:
    """NaN and infinity are no JSON: a value that does not exist is null."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
