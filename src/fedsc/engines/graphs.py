"""The fast engine: several clients at once on the GPUs, each step a captured CUDA graph.

A step of a small network is over before the CPU has launched its kernels one by one. So a slot
(room for one client in flight) captures the whole step once: picking the batch, crop and flip,
forward and backward passes, teachers, loss, observations, optimiser. Training is then nothing but
replays, and slots on streams of their own fill the card together. Clients go through the slots
largest first, so any number of them runs in the memory of the slots. Where there are several GPUs
the slots are dealt out to them in turn; each GPU holds the data once.

Everything a step reads lies in tensors that stay where they are (`Slot.static`), and `load` fills
them for the next client; a counter on the device says which row of the plan comes next. On a CPU
the same slots run uncaptured, which is how their scheduling is tested everywhere.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..contract import given_loss, given_state, given_teachers, given_weights
from ..data.dataset import Dataset
from ..data.plan import steps_per_epoch
from ..errors import FedscError, in_words
from ..method import Batch, Client, LocalResult, Method, Moment, Task, Upload
from ..models.norm import ConvNorm, ConvNormAtOnce, fix_norms
from ..models.outputs import Outputs
from ..models.resnet import ResNet10, ResNetAtOnce
from ..state import State, to_device
from .local import (
    ClientData,
    Images,
    MemoryOf,
    OnImages,
    Training,
    channels_last,
    copy_into,
    copy_state,
    copy_tensors,
    load_state,
    plan_of,
    refill_message,
    seed_layers,
    total_of,
    what_remains,
)

MOST_SLOTS = 8  # that gain anything on one GPU
MOST_SLOTS_WITH_CUDNN = 5
STEPS_IN_TURN = 4


class Kernels(NamedTuple):
    """The parts of a step that can be compiled."""

    train_batch: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    forward: Callable[[nn.Module, Tensor], Outputs]
    loss: Callable[[Batch], dict[str, Tensor]]
    observe: Callable[[Moment, Batch, State], State]


class AtOnce(NamedTuple):
    """Parts of a network for which there are kernels of our own."""

    conv_norm: ConvNormAtOnce
    resnet: ResNetAtOnce


class Place:
    """A device with slots on it: its copy of the images and of the server's message."""

    def __init__(self, device: torch.device, data: Dataset, engine: GraphEngine) -> None:
        self.device = device
        self.images = Images(data.to(device), engine.training, engine.method.uses_stages)
        self.message: State = {}  # the same for all clients of a round
        self.has_message = False
        self.plain = self.compiled = Kernels(
            self.images.train_batch, self.images.forward, engine.method.loss, engine.method.observe
        )

    def compile(self) -> None:
        """Compiled here, captured later: fewer kernels, each with more to do."""
        parts: Any = (torch.compile(part, dynamic=False) for part in self.plain)
        self.compiled = Kernels(*parts)

    def receive(self, message: State) -> None:
        if self.has_message:
            refill_message(self.message, message)
        else:
            self.message, self.has_message = clone(to_device(message, self.device)), True


class CannotCaptureError(Exception):
    """The step does something that a graph cannot repeat, such as a branch on a tensor's value."""


class GraphEngine:
    """Trains the clients of a round in a fixed number of slots."""

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        task: Task,
        data: Dataset,
        training: Training,
        client_sizes: list[int],
        devices: list[torch.device],
        num_slots: int | None,
        compile: bool,
        say: Callable[[str], None] = print,
    ) -> None:
        self.say = say
        self.method, self.model, self.task, self.training = method, model, task, training
        self.places = [Place(device, data, self) for device in devices]
        self.home = self.places[0]  # where the server is
        self.images = self.home.images
        self.smallest_client, self.largest_client = min(client_sizes), max(client_sizes)
        self.slots: list[Slot] = []
        self.loose_slot: Slot | None = None
        self.at_once: AtOnce | None = None
        if compile and self.home.device.type == "cuda":
            for place in self.places:
                place.compile()
            if training.precision == "bf16":
                self.at_once = kernels_for(devices)
        default = default_slots(task.cohort_size, len(devices), self.at_once is not None)
        self.num_slots = num_slots or default

    def fit(
        self,
        round: int,
        clients: list[ClientData],
        global_model: State,
        received: State,
        memory_of: MemoryOf,
        on_images: OnImages,
    ) -> Iterator[tuple[Upload, State]]:
        """Train the clients; yields each one's upload and its memory for the next time."""
        for place in self.places:
            place.receive(received)
        # A graph is captured for full batches. Clients too small for one take a step or so per
        # epoch: they share a slot that is not captured, and are over before the others.
        full = [c for c in clients if c.num_samples >= self.training.batch_size]
        small = [c for c in clients if c.num_samples < self.training.batch_size]
        if self.loose_slot is None and self.smallest_client < self.training.batch_size:
            self.loose_slot = self.make_loose_slot(clients[0], global_model, memory_of)
        slots = self.captured_slots(full, global_model, memory_of)
        queues = share_out(full, len(slots), self.training)
        if small and self.loose_slot is not None:
            slots, queues = [*slots, self.loose_slot], [*queues, small]
        results: dict[int, tuple[Upload, State]] = {}
        for slot in slots:
            slot.follow()
        running = [
            slot.work(round, queue, global_model, memory_of, on_images, results)
            for slot, queue in zip(slots, queues, strict=True)
        ]
        while running:  # a few steps of each slot in turn keep all streams busy
            running = [visits for visits in running if next(visits, "over") != "over"]
        for slot in slots:
            slot.join()
        yield from (results[client.id] for client in clients)

    def captured_slots(
        self, clients: list[ClientData], global_model: State, memory_of: MemoryOf
    ) -> list[Slot]:
        """As many slots as the clients can use, made when first needed."""
        while len(self.slots) < (wanted := min(self.num_slots, len(clients))):
            place = self.places[len(self.slots) % len(self.places)]
            try:
                slot = Slot(self, place, captures=place.device.type == "cuda")
                slot.prepare(clients[0], global_model, memory_of(clients[0].id))
            except torch.cuda.OutOfMemoryError:
                slot = None  # freed below, when the traceback no longer holds it
            except Exception as error:
                self.do_without(error)
                continue
            if slot is None:
                self.halve_slots(place)
            else:
                self.slots.append(slot)
        return self.slots[:wanted]

    def do_without(self, error: Exception) -> None:
        """Of what can be done without, give up what the error comes from; or raise it."""
        module = type(error).__module__  # importing the compilers' exceptions takes a second
        compiles = self.home.compiled is not self.home.plain
        if module.startswith("triton") and self.at_once is not None:
            part = "use kernels of our own"
        elif module.startswith(("torch._dynamo", "torch._inductor")) and compiles:
            part = "compile this step"
            for place in self.places:
                place.compiled = place.plain
        else:
            raise error
        self.say(f"cannot {part}, going on without: {in_words(error)[:200]}")
        self.at_once = None  # they need the same tools as the compiler

    def make_loose_slot(self, client: ClientData, global_model: State, memory_of: MemoryOf) -> Slot:
        """The slot for clients smaller than a batch. Made before the others, so that these leave it
        room, and tried, since its kernels are not theirs and take long to load."""
        slot = Slot(self, self.home, captures=False)
        example = dataclasses.replace(client, indices=client.indices[: self.smallest_client])
        try:
            slot.prepare(example, global_model, memory_of(client.id))
        except torch.cuda.OutOfMemoryError:
            raise self.no_room(self.home) from None
        return slot

    def halve_slots(self, place: Place) -> None:
        """Start again with half as many slots, on a card that has no room for more."""
        if self.num_slots == 1:
            raise self.no_room(place)
        self.num_slots //= 2
        self.slots.clear()
        gc.collect()  # a slot's graphs and gradients refer to each other
        if place.device.type == "cuda":
            # cuBLAS keeps a workspace for every stream, also when the stream is gone. Graphs hold
            # their addresses, so this must not come before the slots are given up.
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        self.say(f"out of GPU memory: going on with {self.num_slots} clients at once")

    def no_room(self, place: Place) -> FedscError:
        return FedscError(
            f"not even one client with batches of {self.training.batch_size} fits into the "
            f"memory of {place.device}: take a smaller batch size or model"
        )


def default_slots(cohort_size: int, num_devices: int = 1, at_once: bool = False) -> int:
    """Clients in flight. A few fill a card, and fewer share a skewed cohort out more evenly."""
    most = MOST_SLOTS if at_once else MOST_SLOTS_WITH_CUDNN
    return min(cohort_size, most * num_devices)


def kernels_for(devices: list[torch.device]) -> AtOnce | None:
    """Kernels of our own, where the GPUs and Triton have what they need."""
    if any(torch.cuda.get_device_capability(device) < (9, 0) for device in devices):
        return None
    try:
        from . import hopper, hopper_resnet
    except ImportError:  # no Triton, or one older than 3.4
        return None
    return AtOnce(hopper.conv_norm_at_once, hopper_resnet.resnet_at_once)


def share_out(clients: list[ClientData], number: int, training: Training) -> list[list[ClientData]]:
    """Queues of about equal length: the largest client first, always to the shortest queue."""
    queues: list[list[ClientData]] = [[] for _ in range(number)]
    lengths = [0] * number
    for client in sorted(clients, key=lambda client: (-client.num_samples, client.id)):
        shortest = lengths.index(min(lengths))
        queues[shortest].append(client)
        lengths[shortest] += steps_per_epoch(client.num_samples, training.batch_size)
    return queues


class Slot:
    """Room for one client: a replica of the model and everything its training step reads."""

    def __init__(self, engine: GraphEngine, place: Place, captures: bool) -> None:
        self.place, self.method, self.images = place, engine.method, place.images
        self.training, self.task, self.device = engine.training, engine.task, place.device
        self.home = engine.home.device
        self.captures = captures
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if on_gpu else None
        self.model = channels_last(copy.deepcopy(engine.model).to(self.device))
        if captures and engine.at_once is not None:
            for layer in self.model.modules():
                if isinstance(layer, ConvNorm):
                    layer.at_once = engine.at_once.conv_norm
            # Inside of another model, that could read its stages.
            if isinstance(self.model, ResNet10) and not self.method.uses_stages:
                self.model.at_once = engine.at_once.resnet
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.global_params = {name: p.detach().clone() for name, p in self.params.items()}
        self.teachers: dict[str, nn.Module] = {}
        self.optimiser = torch.optim.SGD(
            self.params.values(),
            lr=self.training.lr,
            momentum=self.training.momentum,
            weight_decay=self.training.weight_decay,
            fused=True,
        )
        for param in self.params.values():  # zeros, as after a fresh start, and at a fixed address
            self.optimiser.state[param]["momentum_buffer"] = torch.zeros_like(param)

        size = self.training.batch_size
        steps = steps_per_epoch(engine.largest_client, size) * self.training.epochs
        static = {
            "order": torch.zeros(steps, size, dtype=torch.int64),
            "weight": torch.zeros(steps, size),
            "shift": torch.zeros(steps, size, 2, dtype=torch.int64),
            "flip": torch.zeros(steps, size, dtype=torch.bool),
            "next": torch.zeros(1, dtype=torch.int64),  # the row of the plan that comes next
            "indices": torch.zeros(engine.largest_client, dtype=torch.int64),
            "id": torch.zeros((), dtype=torch.int64),
            "class_counts": torch.zeros(self.task.num_classes),
            "memory": self.method.init_client(self.task),
        }
        self.static = to_device(static, self.device)
        self.client = Client(self.static["id"], self.static["class_counts"], self.static["memory"])
        first = 0 if self.method.surveys_before_training() else 1
        rounds = range(first, self.task.num_rounds + 1)
        in_order = dict.fromkeys(moment for r in rounds for moment in self.method.moments(r))
        self.moments_of_all_rounds = tuple(in_order)
        self.observed: dict[str, State] = {
            moment: to_device(self.start_observing(moment), self.device)
            for moment in self.moments_of_all_rounds
        }
        self.losses: State = {}  # sums over the steps of the last epoch
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # by whether it is the last epoch
        self.draws = False  # whether a step draws random numbers, as dropout does
        self.random = torch.Generator(self.device) if on_gpu else torch.get_rng_state()

    # A step --------------------------------------------------------------------------------------

    def step(self, last_epoch: bool) -> None:
        """One training step, from the next row of the plan to the optimiser."""
        static, row = self.static, self.static["next"]
        order, weight, shift, flip = (
            static[name].index_select(0, row)[0] for name in ("order", "weight", "shift", "flip")
        )
        kernels = self.place.compiled if self.captures else self.place.plain
        images, labels = kernels.train_batch(static["indices"][order], shift, flip)
        batch = self.batch(images, labels, weight, kernels.forward)
        self.observe("step", batch, kernels)
        terms = given_loss(self.method, kernels.loss(batch))
        for param in self.params.values():
            param.grad = None  # backward then writes the gradient instead of adding to it
        total_of(terms).backward()
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.params.values(), self.training.clip_norm)
        self.optimiser.step()
        if last_epoch:
            self.observe("last_epoch", batch, kernels)
            with torch.no_grad():
                for name, term in terms.items():
                    self.losses.setdefault(name, torch.zeros_like(term)).add_(term)
        row.add_(1)

    def batch(
        self,
        images: Tensor,
        labels: Tensor,
        weight: Tensor,
        forward: Callable[[nn.Module, Tensor], Outputs],
    ) -> Batch:
        student = forward(self.model, images)
        with torch.no_grad():
            teachers = {name: forward(model, images) for name, model in self.teachers.items()}
        return Batch(
            labels,
            weight,
            student,
            teachers,
            self.params,
            self.global_params,
            self.place.message,
            self.client,
            self.observed,
        )

    @torch.no_grad()
    def observe(self, moment: Moment, batch: Batch, kernels: Kernels) -> None:
        if moment in self.moments:
            totals = kernels.observe(moment, batch, self.observed[moment])
            copy_into(self.observed[moment], given_state(self.method, "observe", totals))

    # A client ------------------------------------------------------------------------------------

    def prepare(self, example: ClientData, global_model: State, memory: State) -> None:
        """Try a step, then capture it; what it does to the weights is undone by the next `load`."""
        self.follow()
        with self.on_stream():
            for last_epoch in (False, True):
                for _ in range(3):
                    self.load(1, example, global_model, memory)
                    self.moments = self.moments_of_all_rounds  # the graph is for all of them
                    self.model.train()
                    before = random_state(self.device)
                    self.step(last_epoch)
                    self.draws |= not torch.equal(before, random_state(self.device))
        if not self.captures:
            return
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # of the tries; while capturing, nothing can be given back
            pool = torch.cuda.graph_pool_handle()
            for last_epoch in (False, True):
                graph = torch.cuda.CUDAGraph()
                try:
                    with (
                        self.own_random_numbers(),
                        torch.cuda.graph(graph, pool=pool, stream=self.stream),
                    ):
                        self.step(last_epoch)
                except torch.cuda.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    raise CannotCaptureError(in_words(error)[:200]) from error
                self.graphs[last_epoch] = graph

    @torch.no_grad()
    def load(self, round: int, client: ClientData, global_model: State, memory: State) -> int:
        """Put a client into the slot; returns the number of its steps in an epoch."""
        self.moments = self.method.moments(round)
        seed_layers(self.training.seed, round, client.id)
        weights = self.method.local_model(global_model, memory)
        load_state(self.model, given_weights(self.method, "local_model", weights, global_model))
        fix_norms(self.model, round, self.task.num_rounds)
        names = list(self.global_params)
        copy_tensors(list(self.global_params.values()), [global_model[name] for name in names])
        teachers = self.method.teachers(global_model, memory)
        for name, state in given_teachers(self.method, teachers, global_model).items():
            if name not in self.teachers:
                teacher = copy.deepcopy(self.model).requires_grad_(False)
                self.teachers[name] = teacher.eval()
            load_state(self.teachers[name], state)
        momenta = [state["momentum_buffer"] for state in self.optimiser.state.values()]
        torch._foreach_zero_(momenta)
        plan = plan_of(self.training, round, client)
        epochs, steps = plan.order.shape[:2]
        static = self.static
        rows = {name: getattr(plan, name).flatten(0, 1) for name in ("order", "shift", "flip")}
        rows["weight"] = plan.weight.repeat(epochs, 1)
        for name, values in rows.items():
            if self.captures:
                # From pinned memory: another copy would hold up Python until this slot has done
                # all it was asked to, and the other slots would run dry meanwhile.
                static[name][: len(values)].copy_(values.pin_memory(), non_blocking=True)
            else:
                static[name] = values.to(self.device)  # of the client's own batch size
        static["next"].zero_()
        static["indices"][: client.num_samples].copy_(client.indices)
        static["id"].fill_(client.id)
        static["class_counts"].copy_(client.class_counts)
        copy_into(static["memory"], memory)
        for moment in self.observed:
            self.restart(moment)
        for total in self.losses.values():
            total.zero_()
        return steps

    def start_observing(self, moment: str) -> State:
        totals = self.method.start_observing(moment, self.task)  # type: ignore[arg-type]
        return given_state(self.method, "start_observing", totals)

    def restart(self, moment: str) -> None:
        """The totals of a moment as before the first batch."""
        copy_into(self.observed[moment], self.start_observing(moment))

    def work(
        self,
        round: int,
        queue: list[ClientData],
        global_model: State,
        memory_of: MemoryOf,
        on_images: OnImages,
        results: dict[int, tuple[Upload, State]],
    ) -> Iterator[None]:
        """Train the clients of a queue one after another, a few steps at a time.

        A few, so that the card has something to do while Python loads the next slot's client. An
        uncaptured step takes Python as long as many captured ones take the card.
        """
        asked, in_turn = 0, STEPS_IN_TURN if self.captures else 1
        for client in queue:
            memory = memory_of(client.id)
            with self.on_stream():
                steps = self.load(round, client, global_model, memory)
                self.clean_pass("start", client)
            for epoch in range(0 if round == 0 else self.training.epochs):
                with self.on_stream():
                    self.clean_pass("epoch", client)
                last = epoch == self.training.epochs - 1
                self.model.train()
                for _ in range(steps):
                    with self.on_stream():
                        if self.captures:
                            self.graphs[last].replay()
                        else:
                            self.step(last)
                    on_images(self.static["order"].shape[1])
                    asked += 1
                    if asked % in_turn == 0:
                        yield
            with self.on_stream():
                self.clean_pass("end", client)
                results[client.id] = self.finish(client, memory, steps)

    @torch.no_grad()
    def clean_pass(self, moment: Moment, client: ClientData) -> None:
        if moment not in self.moments:
            return
        self.restart(moment)
        self.model.eval()
        indices = self.static["indices"][: client.num_samples]
        for images, labels in self.images.clean_batches(indices):
            once = torch.ones(len(labels), device=self.device)
            # Not compiled: the last batch of each client has another size.
            plain = self.place.plain
            self.observe(moment, self.batch(images, labels, once, plain.forward), plain)

    @torch.no_grad()
    def finish(self, client: ClientData, memory: State, steps: int) -> tuple[Upload, State]:
        losses = {name: total / steps for name, total in self.losses.items()}
        own = Client(
            self.client.id.clone(),
            self.client.class_counts.clone(),
            to_device(memory, self.device),
        )
        observed: dict[str, State] = {m: clone(self.observed[m]) for m in self.moments}
        result = LocalResult(copy_state(self.model), losses, observed, self.place.message, own)
        upload, memory = what_remains(self.method, client, result)
        return to_server(upload, self.home), to_device(memory, self.home)

    # Streams -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Work of this slot, in order after what was asked for before."""
        stream = contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with stream, self.own_random_numbers():
            yield

    @contextlib.contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """What a client draws depends on the client, whoever is in flight beside it."""
        if not self.draws:
            yield
        elif isinstance(self.random, torch.Generator):
            # Not its values but the generator itself: a graph reads seed and position from memory
            # that belongs to it, and two graphs that share it would overwrite each other's.
            default = torch.cuda.default_generators[self.device.index or 0]
            before = default.graphsafe_get_state()
            default.graphsafe_set_state(self.random)
            try:
                yield
            finally:
                default.graphsafe_set_state(before)
        else:
            torch.set_rng_state(self.random)
            yield
            self.random = torch.get_rng_state()

    def follow(self) -> None:
        """This slot waits for what the server has been asked to do, on its own GPU and this one."""
        if self.stream is not None:
            for device in (self.home, self.device):
                self.stream.wait_stream(torch.cuda.current_stream(device))

    def join(self) -> None:
        """What the server does next waits for this slot."""
        if self.stream is not None:
            torch.cuda.current_stream(self.home).wait_stream(self.stream)


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def clone(state: Any) -> State:
    return {k: clone(v) if isinstance(v, dict) else v.clone() for k, v in state.items()}


def to_server(upload: Upload, device: torch.device) -> Upload:
    parts = ("model", "extra", "losses", "measures")
    moved: Any = {name: to_device(getattr(upload, name), device) for name in parts}
    return dataclasses.replace(upload, **moved)
