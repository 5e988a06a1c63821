"""FedCDA: the server picks, from each client's last few models, those that diverge least.

Wang et al., FedCDA: Federated Learning with Cross-Round Divergence-Aware Aggregation, ICLR 2024.

The server keeps the last `cache` models w and training losses F of every client. In groups, one
after another, it chooses one model per client of the round so as to minimise

    J = mean_n [F_n + L/2 ||w_n||^2] - L/2 ||mean_n w_n||^2

over the group, the groups before it and the clients that are not in the round, each of which keeps
its choice. The global model is the mean of the chosen models of all clients ever heard of. Clients
train with plain cross-entropy. The first rounds are FedAvg and fill the cache.

Since J needs only inner products, the server keeps the sum of the chosen models of the others and
the inner products of the candidates: a round reads the models of its own clients and no more.
"""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..data.randomness import generator
from ..divergence import choose, inner_products
from ..method import LocalResult, Method, Task, Upload
from ..options import option
from ..state import State, to_device

MOST_CHOICES = 3000  # of an exhaustive search: with three models, seven clients a group


@dataclass(frozen=True)
class FedCDA(Method):
    name: ClassVar[str] = "fedcda"

    cache: int = option(3, "K_c: models kept of each client", at_least=1)
    groups: int = option(3, "B_c: groups of clients chosen for one after another", at_least=1)
    lipschitz: float = option(1.0, "L, the weight of the divergence against the losses", at_least=0)
    warmup: float = option(
        0.25, "share of the rounds that are FedAvg and fill the cache", at_least=0, at_most=1
    )
    global_weights: Literal["uniform", "samples"] = option(
        "uniform", "weights of the chosen models in the global model"
    )

    def init_server(self, task: Task) -> State:
        return {
            "round": torch.zeros((), dtype=torch.int64),
            "warmup_rounds": torch.tensor(round(self.warmup * task.num_rounds)),
            "seed": torch.tensor(task.seed),
            "is_trainable": {name: torch.ones((), dtype=torch.bool) for name in task.trainable},
            "cost": torch.zeros(task.num_clients, dtype=torch.float64),  # F + L/2 ||w||^2 as chosen
            "samples": torch.zeros(task.num_clients, dtype=torch.float64),  # 0: not heard of yet
            "chosen_sum": {},  # over all clients heard of, float64
            "weighted_sum": {},  # the same by samples, for global_weights=samples
        }

    def upload(self, result: LocalResult) -> State:
        return {"loss": torch.stack(list(result.losses.values())).sum()}

    def aggregate(
        self, server: State, uploads: list[Upload], records: MutableMapping[int, State]
    ) -> State:
        uploads = sorted(uploads, key=lambda upload: upload.client)
        averaged = self.average(uploads, server.get("model"))
        if self.aggregation == "clipped_mean":
            uploads = self.clip(uploads, server["model"])  # before they are kept for later rounds
        server = {**server, "round": server["round"] + 1}
        floats = {name: w for name, w in averaged.items() if w.is_floating_point()}
        for key in self.sums():  # copies, as they are added to in place
            old = server[key] or {name: torch.zeros_like(w) for name, w in floats.items()}
            server[key] = {name: total.double().clone() for name, total in old.items()}

        self.withdraw(server, uploads, records)
        warming_up = bool(server["round"] <= server["warmup_rounds"])
        by_client = {upload.client: upload for upload in uploads}
        for group in self.split(server, list(by_client)):
            members = [by_client[client] for client in group]
            self.settle(server, members, records, newest_only=warming_up)
        if warming_up:
            return {**server, "model": averaged}

        if self.aggregation in ("median", "trimmed_mean"):
            return {**server, "model": {**averaged, **self.middle_of_chosen(server, records)}}
        uniform = self.global_weights == "uniform"
        total = (server["samples"] > 0).sum() if uniform else server["samples"].sum()
        summed = server[self.sums()[-1]]
        model = {name: (value / total).to(averaged[name]) for name, value in summed.items()}
        return {**server, "model": {**averaged, **model}}  # integer buffers: the maximum

    def sums(self) -> tuple[str, ...]:
        """The sums of chosen models that the server keeps, the last for the global model."""
        if self.global_weights == "uniform":
            return ("chosen_sum",)
        return "chosen_sum", "weighted_sum"

    def middle_of_chosen(self, server: State, records: MutableMapping[int, State]) -> State:
        """The median or the trimmed mean of all clients' chosen models.

        Unlike the sums it has to read them all: a model in memory for each client heard of.
        """
        device = next(iter(server["chosen_sum"].values())).device
        models = []
        for client in server["samples"].nonzero().flatten().tolist():
            record = records[client]  # perhaps read from disk, and then on the CPU
            models.append(to_device(record["models"][str(int(record["chosen"]))], device))
        return self.middle(models)

    def withdraw(
        self, server: State, uploads: list[Upload], records: MutableMapping[int, State]
    ) -> None:
        """Take the round's clients, if known, out of the sums: they are chosen for anew."""
        server["samples"] = server["samples"].clone()
        server["cost"] = server["cost"].clone()
        for upload in uploads:
            samples = server["samples"][upload.client].clone()
            if samples:
                record = records[upload.client]
                add_to_sums(server, record["models"][str(int(record["chosen"]))], -1.0, samples)
            server["samples"][upload.client] = 0

    def push(self, record: State, upload: Upload) -> State:
        """A client's record with its new model behind the older ones, the oldest dropped."""
        kept = [record["models"][name] for name in sorted(record.get("models", {}), key=int)]
        floats = {name: w for name, w in upload.model.items() if w.is_floating_point()}
        models = [*kept, floats][-self.cache :]
        loss = upload.extra["loss"].double().reshape(1).cpu()
        losses = torch.cat([record["losses"], loss] if record else [loss])
        return {
            "models": {str(i): model for i, model in enumerate(models)},
            "losses": losses[-self.cache :],
            "chosen": torch.tensor(len(models) - 1),
            "samples": torch.tensor(float(upload.num_samples), dtype=torch.float64),
        }

    def split(self, server: State, clients: list[int]) -> list[list[int]]:
        """The round's clients in random groups, small enough for an exhaustive search."""
        rng = generator("server", int(server["seed"]), int(server["round"]))
        largest = max(s for s in range(1, 13) if self.cache**s <= MOST_CHOICES or s == 1)
        number = min(len(clients), max(self.groups, -(-len(clients) // largest)))
        return [part.tolist() for part in np.array_split(rng.permutation(clients), number)]

    def settle(
        self,
        server: State,
        group: list[Upload],
        records: MutableMapping[int, State],
        newest_only: bool,
    ) -> None:
        """Choose a model for each client of a group and add the chosen ones to the sums."""
        members = [self.push(records.get(upload.client, {}), upload) for upload in group]
        models = [list(record["models"].values()) for record in members]  # oldest first
        trainable = server["is_trainable"]
        gram, with_others, others = inner_products(
            [model for own in models for model in own], server["chosen_sum"], trainable
        )
        offsets = [0, *itertools.accumulate(len(own) for own in models)]
        losses = torch.cat([record["losses"].to(gram.device) for record in members])
        costs = losses + self.lipschitz / 2 * gram.diagonal()
        known = server["samples"] > 0
        if newest_only:
            rows = [end - 1 for end in offsets[1:]]
        else:
            candidates = [range(a, b) for a, b in itertools.pairwise(offsets)]
            rows, _ = choose(
                candidates,
                costs,
                gram,
                with_others,
                others,
                float(server["cost"][known].sum()),
                int(known.sum()),
                self.lipschitz,
            )
        for upload, record, row, first in zip(group, members, rows, offsets, strict=False):
            chosen = row - first
            records[upload.client] = {**record, "chosen": torch.tensor(chosen)}
            server["cost"][upload.client] = costs[row]
            server["samples"][upload.client] = record["samples"]
            add_to_sums(server, record["models"][str(chosen)], 1.0, record["samples"])


def add_to_sums(server: State, model: State, sign: float, samples: Tensor) -> None:
    """Add a model to the sums, or take it out; the sums change in place."""
    for name, value in model.items():
        value = value.to(server["chosen_sum"][name])
        server["chosen_sum"][name].add_(value, alpha=sign)
        if server["weighted_sum"]:
            server["weighted_sum"][name].add_(value, alpha=sign * float(samples))
