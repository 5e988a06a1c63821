"""Networks by name or from the user's own file, and a check of the convention they follow."""

from __future__ import annotations

from torch import nn

from ..errors import FedscError, in_words, unknown
from ..plugins import is_path, object_from_path
from .check import CONVENTION, check_model
from .mobilenet import MobileNetV2
from .norm import NORMS, norm_layer
from .outputs import Outputs
from .resnet import ResNet10
from .small import MLP, Conv4, SmallCNN

__all__ = [
    "CONVENTION",
    "MLP",
    "MODELS",
    "Conv4",
    "MobileNetV2",
    "Outputs",
    "ResNet10",
    "SmallCNN",
    "build_model",
    "check_model",
    "default_model",
    "model_from_path",
    "norm_layer",
]

MODELS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "cnn": SmallCNN,
    "conv4": Conv4,
    "resnet10": ResNet10,
    "mobilenetv2": MobileNetV2,
}
# Each max-pool halves the image; fewer pixels would leave none. The others take any size.
SMALLEST_IMAGE = {"cnn": 4, "conv4": 16}


def build_model(
    name: str, image_shape: tuple[int, int, int], num_classes: int, norm: str = "auto"
) -> nn.Module:
    """A new network with fresh weights; `name` is one of MODELS or `path/to/file.py:Name`.

    `norm` is batch, fixed, group, none or auto: batch for convolutional networks, none for the MLP.
    """
    if norm not in ("auto", *NORMS):
        raise unknown("norm", norm, ("auto", *NORMS))
    _check_sizes(image_shape, num_classes)
    if is_path(name):
        if norm != "auto":
            raise FedscError(
                f"norm '{norm}' applies to built-in models only, not to '{name}': "
                "leave norm at 'auto' and choose the norm in your file"
            )
        return model_from_path(name, image_shape, num_classes)
    if name not in MODELS:
        raise unknown("model", name, (*MODELS, "path/to/file.py:Name"))
    _, height, width = image_shape
    smallest = SMALLEST_IMAGE.get(name, 1)
    if min(height, width) < smallest:
        raise FedscError(
            f"images of {height}x{width} pixels are too small for model '{name}', which needs "
            f"at least {smallest}x{smallest}: choose another model, such as mlp"
        )
    if norm == "auto":
        norm = "none" if name == "mlp" else "batch"
    return MODELS[name](image_shape, num_classes, norm=norm)


def _check_sizes(image_shape: tuple[int, int, int], num_classes: int) -> None:
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise FedscError(
            f"image_shape {tuple(image_shape)} is not (channels, height, width), each at least 1"
        )
    if num_classes < 1:
        raise FedscError(f"num_classes is {num_classes}: it must be at least 1")


def default_model(dataset_name: str, image_shape: tuple[int, int, int]) -> str:
    """The name of the network to use when the user chose none."""
    if dataset_name == "digits":
        return "mlp"
    if dataset_name == "fc100":
        return "resnet10"
    _, height, width = image_shape
    by_size = {(28, 28): "cnn", (32, 32): "resnet10", (64, 64): "mobilenetv2"}
    return by_size.get((height, width), "mlp" if max(height, width) <= 16 else "resnet10")


def model_from_path(
    path_and_name: str, image_shape: tuple[int, int, int], num_classes: int
) -> nn.Module:
    """Import `path/to/file.py:Name` and call `Name(image_shape, num_classes)`."""
    factory = object_from_path("model", path_and_name)
    try:
        model = factory(image_shape, num_classes)
    except Exception as error:
        raise FedscError(
            f"model '{path_and_name}' called with image_shape={tuple(image_shape)}, "
            f"num_classes={num_classes} by position failed: {in_words(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise FedscError(
            f"model '{path_and_name}' called with (image_shape, num_classes) gave a "
            f"{type(model).__name__}, not an nn.Module; {CONVENTION}"
        )
    return model
