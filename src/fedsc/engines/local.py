"""What every engine needs to train a client: the settings, the data, and states in and out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from ..contract import given_state
from ..data.dataset import Augment, Dataset
from ..data.plan import ClientPlan, client_plan
from ..data.randomness import generator
from ..data.transform import crop_and_flip, normalise
from ..errors import FedscError
from ..method import LocalResult, Method, Upload
from ..models.outputs import Outputs
from ..privacy import NOT_PRIVATE, Privacy
from ..state import State, lacking, layout

Precision = Literal["fp32", "bf16"]
MemoryOf = Callable[[int], State]  # a client's memory, perhaps read from disk
# No gradients: larger batches than in training fit. On a GPU Python is what takes the time.
CLEAN_BATCH = {"cpu": 512, "cuda": 1024}
PREPARED_BYTES = 256 * 2**20
OnImages = Callable[[int], None]  # told, batch after batch, how many images were trained on

# glibc's numbers for what `keep_freed_memory` sets (malloc.h).
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors for the next ones, where malloc is glibc's.

    It gives large blocks back to the system at once, and gets pages for the next ones that the
    system must clear first. A step makes the same tensors again and again: with a small
    convolutional network that took a fifth to a half of it, and more of a test.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError, OSError):  # macOS, musl; Windows
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@dataclass(frozen=True)
class Training:
    """Local training, the same for every method."""

    seed: int
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    clip_norm: float | None
    augment: Augment
    precision: Precision
    privacy: Privacy = NOT_PRIVATE
    noise_key: int = 0  # beside the seed, in what differential privacy draws


@dataclass(frozen=True)
class ClientData:
    """One client's share: which training images, and how many of each class."""

    id: int
    indices: Tensor  # (n_k,) int64, on the device of the images
    class_counts: Tensor  # (C,) float32

    @property
    def num_samples(self) -> int:
        return len(self.indices)


class Images:
    """The training images on their device, and how a network sees them."""

    def __init__(self, data: Dataset, training: Training, uses_stages: bool) -> None:
        self.images, self.labels = data.train_images, data.train_labels
        device = self.images.device
        self.mean = torch.tensor(data.mean, device=device).view(-1, 1, 1)
        self.std = torch.tensor(data.std, device=device).view(-1, 1, 1)
        self.augment = training.augment != "none"
        self.prepared = self.unchanging(self.images) if not self.augment else None
        self.test_images = data.test_images
        self.prepared_test = self.unchanging(self.test_images)
        self.precision = training.precision
        self.uses_stages = uses_stages

    def train_batch(self, picked: Tensor, shift: Tensor, flip: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented, normalised images and labels of one step; `picked` (B,) are their indices."""
        if self.augment:
            images = self.normalised(crop_and_flip(self.images[picked], shift, flip))
        else:
            images = self.picked(picked)
        return images, self.labels[picked]

    def clean_batches(
        self, indices: Tensor, size: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """All of a client's images once, in order, without augmentation."""
        for picked in indices.split(size or CLEAN_BATCH[self.images.device.type]):
            yield self.picked(picked), self.labels[picked]

    def picked(self, indices: Tensor) -> Tensor:
        """Some of the training images as they are, normalised."""
        if self.prepared is None:
            return self.normalised(self.images[indices])
        return self.prepared[indices].contiguous(memory_format=torch.channels_last)

    def test_batches(self, size: int) -> Iterator[Tensor]:
        """The test images, normalised."""
        if self.prepared_test is not None:
            yield from self.prepared_test.split(size)
        else:
            yield from map(self.normalised, self.test_images.split(size))

    def unchanging(self, images: Tensor) -> Tensor | None:
        """All images normalised once, where that is worth the memory: small models on a CPU would
        spend a tenth of their time on it."""
        if images.device.type != "cpu" or images.numel() * 4 > PREPARED_BYTES:
            return None
        return self.normalised(images)

    def normalised(self, images: Tensor) -> Tensor:
        """In the memory layout in which convolutions are fastest."""
        normal = normalise(images, self.mean, self.std)
        return normal.contiguous(memory_format=torch.channels_last)

    def forward(self, model: Callable[[Tensor], Outputs], images: Tensor) -> Outputs:
        """A forward pass in the run's precision; losses always see float32."""
        if self.precision == "bf16":
            with torch.autocast(images.device.type, torch.bfloat16):
                outputs = model(images)
        else:
            outputs = model(images)
        return Outputs(
            outputs.features.float(),
            outputs.logits.float(),
            # Keeping them costs memory and, where the model is compiled, a copy of each.
            outputs.stages if self.uses_stages else (),
        )


class Engine(Protocol):
    """What a federation asks of an engine."""

    images: Images

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


def channels_last(model: nn.Module) -> nn.Module:
    """The model with its convolutions' weights in the layout of `Images.normalised`."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def plan_of(training: Training, round: int, client: ClientData) -> ClientPlan:
    """A client's batches in a round; none in round 0, which is a survey without training."""
    epochs = training.epochs if round else 0
    return client_plan(
        training.seed,
        round,
        client.id,
        client.num_samples,
        epochs,
        training.batch_size,
        training.augment,
    )


def seed_layers(seed: int, round: int, client: int) -> None:
    """For models with random layers of their own, such as dropout: nothing else draws from it."""
    number = int(generator("layers", seed, round, client).integers(2**63))
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes 0.4 ms, for each client
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def what_remains(method: Method, client: ClientData, result: LocalResult) -> tuple[Upload, State]:
    """What a client's round leaves: its upload, and its memory for the next time."""
    extra = given_state(method, "upload", method.upload(result))
    measures = given_state(method, "measure", method.measure(result))
    upload = Upload(
        client=client.id,
        num_samples=client.num_samples,
        model=result.model,
        extra=extra,
        losses=result.losses,
        measures=measures,
    )
    return upload, given_state(method, "remember", method.remember(result))


def total_of(terms: dict[str, Tensor]) -> Tensor:
    """What is minimised. The common case of one term costs nothing."""
    first, *others = terms.values()
    return torch.stack([first, *others]).sum() if others else first


@torch.no_grad()
def load_state(model: nn.Module, state: State) -> None:
    """Copy a state into a model's own tensors, in place."""
    own = model.state_dict()
    copy_tensors(list(own.values()), [state[name] for name in own])


@torch.no_grad()
def copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    """All floating-point tensors in one launch, where PyTorch can: a client has a hundred."""
    pairs = list(zip(targets, sources, strict=True))
    floats = [pair for pair in pairs if pair[0].is_floating_point()]
    if floats:
        torch._foreach_copy_([target for target, _ in floats], [source for _, source in floats])
    for target, source in pairs:
        if not target.is_floating_point():
            target.copy_(source)


def copy_state(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def refill_message(static: State, received: State) -> None:
    """Put a round's message where the first one lies."""
    was, is_now = layout(static), layout(received)
    if was.keys() != is_now.keys():
        raise FedscError(
            f"broadcast gives {', '.join(sorted(is_now)) or 'nothing'}, in the first round "
            f"{', '.join(sorted(was)) or 'nothing'}: give every tensor from the first round on, "
            "with a mask while it means nothing"
        )
    problem = lacking(is_now, was)
    if problem:
        raise FedscError(
            f"broadcast gives another message than in the first round: {problem}; every tensor "
            "keeps its shape and type from round to round"
        )
    copy_into(static, received)


def copy_into(static: State, values: State) -> None:
    """Copy the values that a static state has room for."""
    for name, target in static.items():
        if isinstance(target, dict):
            copy_into(target, values[name])
        else:
            target.copy_(values[name], non_blocking=True)
