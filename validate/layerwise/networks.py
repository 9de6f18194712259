"""Layer tables of the networks of the layer-wise checks, as torchvision and Jia et al. 2018 have them.

Each function gives the layer graph for the batch of one GPU; no torch and no GPU needed.
"""

from __future__ import annotations

from collections.abc import Callable

from gpusim.layerwise.layers import LayerGraph
from gpusim.layerwise.network_builder import NetworkBuilder


def alexnet(batch: int, *, wide: bool = False) -> LayerGraph:
    """torchvision's AlexNet (61 M weights); `wide` flattens 7 x 7 maps as the paper's does (74.7 M)."""
    net = NetworkBuilder("alexnet", batch)
    at = net.convolution((3, 224, 224), 64, 11, stride=4, padding=2, bias=True, relu=True, name="conv1")
    at = net.pool(at, 3, stride=2, name="pool1")
    at = net.convolution(at, 192, 5, padding=2, bias=True, relu=True, name="conv2")
    at = net.pool(at, 3, stride=2, name="pool2")
    at = net.convolution(at, 384, 3, padding=1, bias=True, relu=True, name="conv3")
    at = net.convolution(at, 256, 3, padding=1, bias=True, relu=True, name="conv4")
    at = net.convolution(at, 256, 3, padding=1, bias=True, relu=True, name="conv5")
    at = net.pool(at, 3, stride=2, padding=1 if wide else 0, name="pool3")
    at = net.flatten(at, "flatten")
    at = net.linear(at, 4096, relu=True, dropout=0.5, name="fc1")
    at = net.linear(at, 4096, relu=True, dropout=0.5, name="fc2")
    at = net.linear(at, 1000, name="fc3")
    net.loss(at)
    return net.graph()


def vgg16(batch: int) -> LayerGraph:
    """VGG-16 without BatchNorm (138 M weights)."""
    net = NetworkBuilder("vgg16", batch)
    at: int | tuple[int, int, int] = (3, 224, 224)
    number = 0
    for block, (channels, convolutions) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for _ in range(convolutions):
            number += 1
            at = net.convolution(at, channels, 3, padding=1, bias=True, relu=True, name=f"conv{number}")
        at = net.pool(at, 2, name=f"pool{block}")
    at = net.flatten(at, "flatten")
    at = net.linear(at, 4096, relu=True, dropout=0.5, name="fc1")
    at = net.linear(at, 4096, relu=True, dropout=0.5, name="fc2")
    at = net.linear(at, 1000, name="fc3")
    net.loss(at)
    return net.graph()


def inception_v3(batch: int, *, auxiliary: bool = False) -> LayerGraph:
    """Inception-v3 (23.8 M weights), at 299 x 299 pixels; without its auxiliary classifier unless asked for."""
    net = NetworkBuilder("inception_v3", batch)

    def conv(at: int | tuple[int, int, int], channels: int, kernel: int | tuple[int, int], **more: object) -> int:
        return net.convolution(at, channels, kernel, norm=True, relu=True, **more)  # type: ignore[arg-type]

    def pooled(at: int) -> int:
        return net.pool(at, 3, stride=1, padding=1, average=True)

    at = conv((3, 299, 299), 32, 3, stride=2)
    at = conv(at, 32, 3)
    at = conv(at, 64, 3, padding=1)
    at = net.pool(at, 3, stride=2)
    at = conv(at, 80, 1)
    at = conv(at, 192, 3)
    at = net.pool(at, 3, stride=2)
    for features in (32, 64, 64):
        at = net.concat(
            [
                conv(at, 64, 1),
                conv(conv(at, 48, 1), 64, 5, padding=2),
                conv(conv(conv(at, 64, 1), 96, 3, padding=1), 96, 3, padding=1),
                conv(pooled(at), features, 1),
            ]
        )
    at = net.concat(
        [
            conv(at, 384, 3, stride=2),
            conv(conv(conv(at, 64, 1), 96, 3, padding=1), 96, 3, stride=2),
            net.pool(at, 3, stride=2),
        ]
    )
    for width in (128, 160, 160, 192):
        long = conv(conv(at, width, 1), width, (7, 1), padding=(3, 0))
        long = conv(conv(long, width, (1, 7), padding=(0, 3)), width, (7, 1), padding=(3, 0))
        at = net.concat(
            [
                conv(at, 192, 1),
                conv(conv(conv(at, width, 1), width, (1, 7), padding=(0, 3)), 192, (7, 1), padding=(3, 0)),
                conv(long, 192, (1, 7), padding=(0, 3)),
                conv(pooled(at), 192, 1),
            ]
        )
    if auxiliary:
        side = conv(conv(net.pool(at, 5, stride=3, average=True), 128, 1), 768, 5)
        net.loss(net.linear(net.flatten(net.global_pool(side)), 1000), "auxiliary_loss")
    seven = conv(conv(conv(at, 192, 1), 192, (1, 7), padding=(0, 3)), 192, (7, 1), padding=(3, 0))
    at = net.concat(
        [conv(conv(at, 192, 1), 320, 3, stride=2), conv(seven, 192, 3, stride=2), net.pool(at, 3, stride=2)]
    )
    for _ in range(2):
        middle = conv(at, 384, 1)
        deep = conv(conv(at, 448, 1), 384, 3, padding=1)
        at = net.concat(
            [
                conv(at, 320, 1),
                net.concat([conv(middle, 384, (1, 3), padding=(0, 1)), conv(middle, 384, (3, 1), padding=(1, 0))]),
                net.concat([conv(deep, 384, (1, 3), padding=(0, 1)), conv(deep, 384, (3, 1), padding=(1, 0))]),
                conv(pooled(at), 192, 1),
            ]
        )
    net.loss(net.linear(net.flatten(net.global_pool(at)), 1000, dropout=0.0))
    return net.graph()


def resnet50(batch: int) -> LayerGraph:
    """ResNet-50 (25.6 M weights)."""
    net = NetworkBuilder("resnet50", batch)
    at = net.convolution((3, 224, 224), 64, 7, stride=2, padding=3, norm=True, relu=True)
    at = net.pool(at, 3, stride=2, padding=1)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride, width = (2 if stage and not block else 1), 64 << stage
            inner = net.convolution(at, width, 1, norm=True, relu=True)
            inner = net.convolution(inner, width, 3, stride=stride, padding=1, norm=True, relu=True)
            inner = net.convolution(inner, 4 * width, 1, norm=True)
            short = at if block else net.convolution(at, 4 * width, 1, stride=stride, norm=True)
            at = net.add([inner, short], relu=True)
    net.loss(net.linear(net.flatten(net.global_pool(at)), 1000))
    return net.graph()


def densenet121(batch: int) -> LayerGraph:
    """DenseNet-121 (8 M weights); each concatenation adds new channels to the last one."""
    net = NetworkBuilder("densenet121", batch)
    at = net.convolution((3, 224, 224), 64, 7, stride=2, padding=3, norm=True, relu=True)
    at = net.pool(at, 3, stride=2, padding=1)
    for block, layers in enumerate((6, 12, 24, 16)):
        for _ in range(layers):
            new = net.convolution(net.batch_norm(at, relu=True), 128, 1, norm=True, relu=True)
            at = net.concat([at, net.convolution(new, 32, 3, padding=1)])
        if block < 3:
            at = net.convolution(net.batch_norm(at, relu=True), net.extents(at)[1] // 2, 1)
            at = net.pool(at, 2, average=True)
    at = net.global_pool(net.batch_norm(at, relu=True))
    net.loss(net.linear(net.flatten(at), 1000))
    return net.graph()


def encoder(batch: int, *, blocks: int = 2, width: int = 256, heads: int = 8, positions: int = 64) -> LayerGraph:
    """A transformer encoder on embedded positions."""
    net = NetworkBuilder("encoder", batch)
    at = net.linear((width, positions, 1), width, name="embed")
    for _ in range(blocks):
        norm = net.layer_norm(at)
        mixed = net.attention(net.linear(norm, width), net.linear(norm, width), net.linear(norm, width), heads)
        at = net.add([at, net.linear(mixed, width)])
        wide = net.gelu(net.linear(net.layer_norm(at), 4 * width))
        at = net.add([at, net.linear(wide, width)])
    net.loss(net.linear(net.flatten(at), 10))
    return net.graph()


NETWORKS: dict[str, Callable[[int], LayerGraph]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "inception_v3": inception_v3,
    "resnet50": resnet50,
    "densenet121": densenet121,
}
