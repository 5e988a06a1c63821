"""The readable engine: one client after another, ordinary autograd. The oracle for all others."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..contract import given_loss, given_state, given_teachers, given_weights
from ..data.dataset import Dataset
from ..data.plan import ClientPlan
from ..data.randomness import generator
from ..method import Batch, Client, LocalResult, Method, Moment, Task, Upload
from ..models.norm import fix_norms
from ..privacy import clip_rows, noised_totals
from ..state import State, to_device
from .local import (
    ClientData,
    Images,
    MemoryOf,
    OnImages,
    Training,
    channels_last,
    copy_state,
    keep_freed_memory,
    load_state,
    plan_of,
    seed_layers,
    total_of,
    what_remains,
)
from .private import PrivateSteps

# When methods gather the class sums behind prototypes.
PROTOTYPE_MOMENTS: tuple[Moment, ...] = ("last_epoch", "end")


class SequentialEngine:
    """Trains the clients of a round one by one in a single replica of the model."""

    def __init__(
        self, method: Method, model: nn.Module, task: Task, data: Dataset, training: Training
    ) -> None:
        self.method, self.task, self.training = method, task, training
        self.images = Images(data, training, method.uses_stages)
        self.device = data.train_images.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.model = channels_last(copy.deepcopy(model))
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimiser = torch.optim.SGD(
            self.params.values(),
            lr=self.training.lr,
            momentum=self.training.momentum,
            weight_decay=self.training.weight_decay,
            fused=True,
        )
        self.teachers: dict[str, nn.Module] = {}

    def fit(
        self,
        round: int,
        clients: list[ClientData],
        global_model: State,
        received: State,
        memory_of: MemoryOf,
        on_images: OnImages,
    ) -> Iterator[tuple[Upload, State]]:
        """Train the clients; yields each one's upload and its memory for the next time.

        Round 0 is a survey: observations of the received model, no training.
        """
        for client in clients:
            memory = memory_of(client.id)
            yield self.fit_one(round, client, global_model, received, memory, on_images)

    def fit_one(
        self,
        round: int,
        client_data: ClientData,
        global_model: State,
        received: State,
        memory: State,
        on_images: OnImages,
    ) -> tuple[Upload, State]:
        seed_layers(self.training.seed, round, client_data.id)
        client = Client(
            torch.tensor(client_data.id, device=self.device),
            client_data.class_counts,
            to_device(memory, self.device),
        )
        visit = Visit(self, round, client_data, client, global_model, received, on_images)
        return what_remains(self.method, client_data, visit.train())

    def teacher(self, name: str, state: State) -> nn.Module:
        """A frozen replica in evaluation mode with the given weights."""
        if name not in self.teachers:
            self.teachers[name] = copy.deepcopy(self.model).requires_grad_(False)
        load_state(self.teachers[name], state)
        return self.teachers[name].eval()


class Visit:
    """Local training of one client in one round."""

    def __init__(
        self,
        engine: SequentialEngine,
        round: int,
        client_data: ClientData,
        client: Client,
        global_model: State,
        received: State,
        on_images: OnImages,
    ) -> None:
        self.engine, self.method, self.images = engine, engine.method, engine.images
        self.training, self.model, self.params = engine.training, engine.model, engine.params
        self.round, self.client_data, self.client = round, client_data, client
        self.received, self.on_images = received, on_images
        weights = self.method.local_model(global_model, client.memory)
        load_state(self.model, given_weights(self.method, "local_model", weights, global_model))
        fix_norms(self.model, round, engine.task.num_rounds)
        self.global_params = {name: global_model[name] for name in self.params}
        teachers = self.method.teachers(global_model, client.memory)
        self.teachers = {
            name: engine.teacher(name, state)
            for name, state in given_teachers(self.method, teachers, global_model).items()
        }
        self.moments = self.method.moments(round)
        self.observed: dict[str, State] = {}

    def train(self) -> LocalResult:
        training = self.training
        plan = plan_of(training, self.round, self.client_data).to(self.engine.device)
        epochs, steps = plan.order.shape[:2]
        # Fresh every round: momentum does not outlive the weights it was made for.
        self.engine.optimiser.state.clear()
        private = PrivateSteps(self, plan) if training.privacy.trains_privately else None
        self.clean_pass("start")
        self.begin("step")
        losses: dict[str, Tensor] = {}
        for epoch in range(epochs):
            self.clean_pass("epoch")
            last = epoch == epochs - 1
            if last:
                self.begin("last_epoch")
            self.model.train()
            for step in range(steps):
                if private is not None:
                    terms = private.step(epoch, step)
                    self.descend()
                else:
                    terms = self.step(plan, epoch, step, last)
                if last:
                    for name, term in terms.items():
                        losses[name] = losses.get(name, 0) + term.detach() / steps
        self.clean_pass("end")
        self.add_noise()
        return LocalResult(
            copy_state(self.model), losses, self.observed, self.received, self.client
        )

    def step(self, plan: ClientPlan, epoch: int, step: int, last_epoch: bool) -> dict[str, Tensor]:
        images, labels = self.images.train_batch(
            self.client_data.indices[plan.order[epoch, step]],
            plan.shift[epoch, step],
            plan.flip[epoch, step],
        )
        batch = self.batch(images, labels, plan.weight[step])
        self.observe("step", batch)
        terms = self.method.loss(batch)
        if epoch == step == 0:
            given_loss(self.method, terms)
        for param in self.params.values():
            param.grad = None
        total_of(terms).backward()
        self.descend()
        if last_epoch:
            self.observe("last_epoch", batch)
        self.on_images(len(labels))
        return terms

    def descend(self) -> None:
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.training.clip_norm)
        self.engine.optimiser.step()

    def batch(self, images: Tensor, labels: Tensor, weight: Tensor) -> Batch:
        """What the method may see: the student's outputs and the teachers' on the same images."""
        student = self.images.forward(self.model, images)
        with torch.no_grad():
            teachers = {
                name: self.images.forward(teacher, images)
                for name, teacher in self.teachers.items()
            }
        return Batch(
            labels,
            weight,
            student,
            teachers,
            self.params,
            self.global_params,
            self.received,
            self.client,
            self.observed,
        )

    def begin(self, moment: Moment) -> None:
        if moment in self.moments:
            totals = self.method.start_observing(moment, self.engine.task)
            totals = given_state(self.method, "start_observing", totals)
            self.observed[moment] = to_device(totals, self.engine.device)

    @torch.no_grad()
    def observe(self, moment: Moment, batch: Batch) -> None:
        if moment not in self.moments:
            return
        bound = self.training.privacy.feature_clip
        if self.training.privacy.hides_features and bound and moment in PROTOTYPE_MOMENTS:
            clipped = batch.student._replace(features=clip_rows(batch.student.features, bound))
            batch = dataclasses.replace(batch, student=clipped)
        totals = self.method.observe(moment, batch, self.observed[moment])
        self.observed[moment] = given_state(self.method, "observe", totals)

    def add_noise(self) -> None:
        """Unit record: to the class sums and counts, before the method makes prototypes of them."""
        training, privacy = self.training, self.training.privacy
        if not privacy.hides_features or privacy.feature_clip is None:
            return
        keys = training.seed, training.noise_key, self.round, self.client_data.id
        rng = generator("prototype_noise", *keys)
        for moment in PROTOTYPE_MOMENTS:
            if moment in self.observed:
                self.observed[moment] = noised_totals(
                    self.observed[moment], privacy.feature_clip, privacy.prototype_noise, rng
                )

    @torch.no_grad()
    def clean_pass(self, moment: Moment) -> None:
        """Show the method all of the client's data, in evaluation mode, without augmentation."""
        if moment not in self.moments:
            return
        self.begin(moment)
        self.model.eval()
        for images, labels in self.images.clean_batches(self.client_data.indices):
            once = torch.ones(len(labels), device=labels.device)
            self.observe(moment, self.batch(images, labels, once))
