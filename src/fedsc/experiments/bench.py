"""How fast is this machine? Images per second of each method, beside a plain DataLoader loop.

Random images in the shape the model is made for, so nothing has to be fetched. A timed round has
all that a real one has: augmentation, prototypes, aggregation and evaluation.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.flop_counter import FlopCounterMode

from ..data.dataset import Dataset, hold_out_classes
from ..data.plan import CROP_PADDING
from ..data.transform import crop_and_flip
from ..federation import Federation
from ..methods import method_from_text
from ..models import build_model
from ..spec import RunSpec
from .runner import pick_device

SHAPES = {
    "mlp": (1, 28, 28),
    "cnn": (1, 28, 28),
    "conv4": (3, 32, 32),
    "resnet10": (3, 32, 32),
    "mobilenetv2": (3, 64, 64),
}
NUM_CLASSES = {"conv4": 100}  # 10 for the others
HELD_OUT_CLASSES = 20  # of FC100, which conv4 is for


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of the table."""

    name: str
    images_per_second: float
    training_images_per_second: float | None  # the same without evaluation
    share_of_ceiling: float | None  # of the measured matrix product
    gpu_memory_gib: float | None
    start_up_seconds: float | None
    round_seconds: float | None
    settings: dict[str, Any]


def bench_method(spec: RunSpec, data: Dataset, rounds: int, ceiling: float) -> Measurement:
    """Rounds of one method, after a first one that pays for compiling and capturing."""
    device = data.train_images.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    model = build_model(spec.model, data.image_shape, data.num_classes, spec.norm)
    began = now(device)
    federation = Federation(spec, data, method_from_text(spec.method), model)
    federation.run_round(1)
    first = now(device) - began
    seconds, evaluating, images = [], [], []
    for round in range(2, rounds + 2):
        began = now(device)
        record = federation.run_round(round)
        seconds.append(now(device) - began)
        evaluating.append(record["timing"]["evaluate_seconds"])
        trained = sum(federation.clients[k].num_samples for k in record["cohort"])
        images.append(trained * spec.epochs)
    rate = sum(images) / sum(seconds)
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return Measurement(
        name=spec.method,
        images_per_second=rate,
        training_images_per_second=sum(images) / (sum(seconds) - sum(evaluating)),
        share_of_ceiling=rate * training_flops(model, data.image_shape) / ceiling,
        gpu_memory_gib=memory,
        start_up_seconds=max(0.0, first - statistics.median(seconds)),
        round_seconds=statistics.median(seconds),
        settings={
            "model": spec.model,
            "clients": spec.num_clients,
            "participation": spec.participation,
            "epochs": spec.epochs,
            "batch_size": spec.batch_size,
            "engine": federation.engine_name,
            "precision": federation.precision,
            "slots": getattr(federation.engine, "num_slots", None),
            "compile": spec.compile,
        },
    )


def bench_plain_loop(spec: RunSpec, data: Dataset, steps: int, ceiling: float) -> Measurement:
    """What most code does: DataLoader, transforms per sample on the CPU, one client, eager fp32."""
    device = data.train_images.device
    torch.manual_seed(0)
    model = (
        build_model(spec.model, data.image_shape, data.num_classes, spec.norm).to(device).train()
    )
    optimiser = torch.optim.SGD(
        model.parameters(), spec.lr, spec.momentum, weight_decay=spec.weight_decay
    )
    loader = DataLoader(PerSample(data), batch_size=spec.batch_size, shuffle=True, drop_last=True)
    began, done = 0.0, 0
    while done < steps + 5:
        for images, labels in loader:
            if done == 5:  # the first steps warm up
                began = now(device)
            optimiser.zero_grad()
            outputs = model(images.to(device))
            nn.functional.cross_entropy(outputs.logits, labels.to(device)).backward()
            optimiser.step()
            done += 1
            if done == steps + 5:
                break
    rate = steps * spec.batch_size / (now(device) - began)
    flops = training_flops(model, data.image_shape)
    settings = {"model": spec.model, "batch_size": spec.batch_size, "precision": "fp32"}
    return Measurement(
        "plain DataLoader loop", rate, rate, rate * flops / ceiling, None, None, None, settings
    )


class PerSample(TorchDataset[tuple[Tensor, int]]):
    """One image at a time on the CPU, cropped, flipped and normalised as its transforms would."""

    def __init__(self, data: Dataset) -> None:
        self.images, self.labels = data.train_images.cpu(), data.train_labels.tolist()
        self.mean = torch.tensor(data.mean).view(-1, 1, 1)
        self.std = torch.tensor(data.std).view(-1, 1, 1)
        self.augment = data.augment != "none"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.augment:
            shift = torch.randint(0, 2 * CROP_PADDING + 1, (1, 2))
            image = crop_and_flip(image[None], shift, torch.rand(1) < 0.5)[0]
        return (image.float() / 255 - self.mean) / self.std, self.labels[index]


def random_data(model: str, device: torch.device, size: int) -> Dataset:
    """Random images for a model, a fifth as many of them for evaluation; few-shot for conv4."""
    num_classes = NUM_CLASSES.get(model, 10)
    rng = torch.Generator().manual_seed(0)
    number = size + size // 5
    images = torch.randint(0, 256, (number, *SHAPES[model]), generator=rng, dtype=torch.uint8)
    labels = torch.randint(0, num_classes, (number,), generator=rng)
    data = Dataset(
        name="random",
        train_images=images[:size],
        train_labels=labels[:size],
        test_images=images[size:],
        test_labels=labels[size:],
        classes=tuple(map(str, range(num_classes))),
        augment="crop-flip" if SHAPES[model][0] == 3 else "none",
    )
    if model == "conv4":
        data = hold_out_classes(data, HELD_OUT_CLASSES)
    return data.to(device)


def matrix_product_ceiling(device: torch.device, precision: str) -> float:
    """FLOP/s of a large matrix product, the most this machine could do."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = min(timed(lambda: a @ b, device) for _ in range(10))
    return 2 * size**3 / best


def training_flops(model: nn.Module, image_shape: tuple[int, int, int]) -> float:
    """Operations of convolutions and products, forward and backward, for one image."""
    device = next(model.parameters()).device
    images = torch.zeros(2, *image_shape, device=device)
    counter = FlopCounterMode(display=False)
    with counter:
        model(images).logits.sum().backward()
    return counter.get_total_flops() / 2


def timed(work: Callable[[], Any], device: torch.device) -> float:
    began = now(device)
    work()
    return now(device) - began


def now(device: torch.device) -> float:
    """The clock, after everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bench(
    model: str,
    methods: list[str],
    rounds: int,
    size: int,
    settings: dict[str, Any],
    on_row: Callable[[Measurement], None],
) -> dict[str, Any]:
    """Measure the methods and the plain loop; returns everything, ready for JSON."""
    device = pick_device(settings.get("device", "auto"))
    data = random_data(model, device, size)
    precision = "bf16" if device.type == "cuda" else "fp32"
    asked = settings.get("precision", "auto")
    ceiling = matrix_product_ceiling(device, precision if asked == "auto" else asked)
    rows = []
    base = {**settings, "model": model, "rounds": rounds + 1}
    plain_steps = 60 if device.type == "cuda" else 5
    rows.append(bench_plain_loop(RunSpec(**base), data, plain_steps, ceiling))
    on_row(rows[-1])
    for method in methods:
        rows.append(bench_method(RunSpec(method=method, **base), data, rounds, ceiling))
        on_row(rows[-1])
    return {
        "ceiling_tflops": ceiling / 1e12,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
