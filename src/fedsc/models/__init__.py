"""Networks by name or from the user's own file, and a check of the convention they follow."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from ..errors import FedscError, unknown
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

CONVENTION = (
    "a model is an nn.Module whose forward(images) returns fedsc.models.Outputs("
    "features (B, d), logits (B, C), stages=()) with logits = self.classifier(features)"
)


def build_model(
    name: str, image_shape: tuple[int, int, int], num_classes: int, norm: str = "auto"
) -> nn.Module:
    """A new network with fresh weights; `name` is one of MODELS or `path/to/file.py:Name`.

    `norm` is batch, group, none or auto: batch for convolutional networks, none for the MLP.
    """
    if norm not in ("auto", *NORMS):
        raise unknown("norm", norm, ("auto", *NORMS))
    _check_sizes(image_shape, num_classes)
    if ".py:" in name:
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
    file, _, name = path_and_name.rpartition(":")  # the last colon: C:\file.py:Name has two
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise FedscError(
            f"model '{path_and_name}': there is no file {path}; give path/to/file.py:Name"
        )
    module = _import_file(path, path.stat().st_mtime_ns)
    if not callable(getattr(module, name, None)):
        raise FedscError(
            f"model '{path_and_name}': {path.name} defines no class or function '{name}'; "
            "give path/to/file.py:Name"
        )
    try:
        model = getattr(module, name)(image_shape, num_classes)
    except Exception as error:
        raise FedscError(
            f"model '{path_and_name}': {name}(image_shape={tuple(image_shape)}, "
            f"num_classes={num_classes}), given by position, failed: {_in_words(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise FedscError(
            f"model '{path_and_name}': {name}(image_shape, num_classes) gave a "
            f"{type(model).__name__}, not an nn.Module; {CONVENTION}"
        )
    return model


@functools.cache
def _import_file(path: Path, modified: int) -> ModuleType:
    """Import once per version of the file, so that every client's model has the same class."""
    # Registered under a name that depends on the file only: pickling a model looks it up.
    module_name = f"fedsc_user_{path.stem}_{zlib.crc32(f'{path}:{modified}'.encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise FedscError(f"importing {path} failed: {_in_words(error)}") from error
    return module


def check_model(model: nn.Module, image_shape: tuple[int, int, int], num_classes: int) -> int:
    """Try the model on two black images and give its feature size d; else say what is wrong."""
    classifier = getattr(model, "classifier", None)
    if not isinstance(classifier, nn.Module):
        raise _breaks_convention(model, "it has no module as attribute `classifier`")
    with torch.no_grad(), _eval_mode(model):
        out = _try_forward(model, image_shape)
        if not isinstance(out, Outputs):
            raise _breaks_convention(model, f"forward gave a {type(out).__name__}, not Outputs")
        _check_shape(model, "features", out.features, "(2, d)", None)
        _check_shape(model, "logits", out.logits, f"(2, {num_classes})", num_classes)
        for index, stage in enumerate(out.stages):
            if not isinstance(stage, Tensor) or stage.ndim < 2 or len(stage) != 2:
                raise _breaks_convention(model, f"stages[{index}] is not a (B, channels, ...)")
        try:  # methods replace the classifier, or keep only the features: they must fit together
            expected = classifier(out.features)
        except Exception as error:
            problem = f"classifier(features) failed: {_in_words(error)}"
            raise _breaks_convention(model, problem) from error
        if not torch.allclose(expected, out.logits, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise _breaks_convention(model, "logits differ from classifier(features)")
    return out.features.shape[1]


def _check_shape(
    model: nn.Module, what: str, tensor: object, wanted: str, columns: int | None
) -> None:
    if not isinstance(tensor, Tensor):
        raise _breaks_convention(model, f"{what} is a {type(tensor).__name__}, not a Tensor")
    shape = tuple(tensor.shape)
    if len(shape) != 2 or shape[0] != 2 or columns not in (None, shape[1]):
        raise _breaks_convention(model, f"{what} of 2 images have shape {shape}, not {wanted}")


def _try_forward(model: nn.Module, image_shape: tuple[int, int, int]) -> object:
    weight = next(model.parameters(), torch.zeros(()))
    images = torch.zeros(2, *image_shape, device=weight.device, dtype=weight.dtype)
    try:
        return model(images)
    except Exception as error:
        shape = tuple(images.shape)
        problem = f"forward failed on images of shape {shape}: {_in_words(error)}"
        raise _breaks_convention(model, problem) from error


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every submodule is as before, also one the user froze."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _breaks_convention(model: nn.Module, problem: str) -> FedscError:
    return FedscError(f"model {type(model).__name__}: {problem}; {CONVENTION}")


def _in_words(error: Exception) -> str:
    """The error on one line, as the command line prints it."""
    return " ".join(f"{type(error).__name__}: {error}".split())
