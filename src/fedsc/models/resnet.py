"""ResNet-10 for 32x32 images: 3x3 stem, no max-pool, four stages of one basic block each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .norm import conv_norm
from .outputs import Outputs


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut. Gives the sum *before* the ReLU that follows it."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = conv_norm(inputs, outputs, 3, norm, stride=stride)
        self.conv2 = conv_norm(outputs, outputs, 3, norm)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same_shape else conv_norm(inputs, outputs, 1, norm, stride=stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.conv2(F.relu(self.conv1(x))) + self.shortcut(x)
        return total


class ResNet10(nn.Module):
    """Features: the mean over the last map, as wide as the last of `widths` (512).

    Stages: the stem and every block, before their ReLU. One block per width; the first keeps the
    image size, each later one halves it.
    """

    # An engine may give a faster way to the last stage, for compiled networks whose other stages
    # nobody reads.
    at_once: ResNetAtOnce | None = None

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        norm: str = "batch",
        widths: Sequence[int] = (64, 128, 256, 512),
    ) -> None:
        super().__init__()
        self.stage_channels = (widths[0], *widths)
        self.stem = conv_norm(image_shape[0], widths[0], 3, norm)
        self.blocks = nn.ModuleList(
            BasicBlock(inputs, outputs, stride=1 if index == 0 else 2, norm=norm)
            for index, (inputs, outputs) in enumerate(
                zip(self.stage_channels, widths, strict=False)
            )
        )
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Outputs:
        last: Tensor | None = None
        stages: tuple[Tensor, ...] = ()
        if self.at_once is not None and torch.compiler.is_compiling():
            last = self.at_once(self, images)
        if last is None:
            stages = self.stages(images)
            last = stages[-1]
        # The mean over (2, 3), seen as one over the middle axis: compiled it takes 4 µs, not 23.
        features = F.relu(last).permute(0, 2, 3, 1).flatten(1, 2).mean(1)
        return Outputs(features, self.classifier(features), stages)

    def stages(self, images: Tensor) -> tuple[Tensor, ...]:
        # F.relu is not in place, so the stages keep their negative values.
        stages: list[Tensor] = [self.stem(images)]
        for block in self.blocks:
            stages.append(block(F.relu(stages[-1])))
        return tuple(stages)


# The last stage, or None where this way is not for the network as it is.
ResNetAtOnce = Callable[[ResNet10, Tensor], Tensor | None]
