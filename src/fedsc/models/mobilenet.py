"""MobileNetV2 with 512 features: the last 1x1 convolution is 320->512 instead of 320->1280."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .norm import conv_norm
from .outputs import Outputs

# (expansion, channels, blocks, stride of the first block) of each bottleneck stage
BOTTLENECK_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM_CHANNELS = 32
FEATURES = 512


class Bottleneck(nn.Module):
    """Widen (1x1), filter each channel (3x3), narrow (1x1). Its output has no activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, norm: str) -> None:
        super().__init__()
        wide = inputs * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [conv_norm(inputs, wide, 1, norm), nn.ReLU6()]
        layers += [conv_norm(wide, wide, 3, norm, stride=stride, groups=wide), nn.ReLU6()]
        layers += [conv_norm(wide, outputs, 1, norm)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    """Features: 512, the mean over the last map.

    Stages, in order with the channels in `stage_channels`: the stem before its ReLU6, then the
    seven bottleneck stages, which end without an activation.
    """

    stage_channels = (STEM_CHANNELS, *(channels for _, channels, _, _ in BOTTLENECK_STAGES))

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        norm: str = "batch",
        stem_stride: int = 2,
    ) -> None:
        super().__init__()
        self.stem = conv_norm(image_shape[0], STEM_CHANNELS, 3, norm, stride=stem_stride)
        self.bottlenecks = nn.ModuleList()
        inputs = STEM_CHANNELS
        for expansion, channels, blocks, stride in BOTTLENECK_STAGES:
            stage = [Bottleneck(inputs, channels, stride, expansion, norm)]
            stage += [Bottleneck(channels, channels, 1, expansion, norm) for _ in range(blocks - 1)]
            self.bottlenecks.append(nn.Sequential(*stage))
            inputs = channels
        self.last = conv_norm(inputs, FEATURES, 1, norm)
        self.classifier = nn.Linear(FEATURES, num_classes)

    def forward(self, images: Tensor) -> Outputs:
        x: Tensor = self.stem(images)
        stages = [x]
        x = F.relu6(x)
        for bottleneck in self.bottlenecks:
            x = bottleneck(x)
            stages.append(x)
        features = F.relu6(self.last(x)).mean(dim=(2, 3))
        return Outputs(features, self.classifier(features), tuple(stages))
