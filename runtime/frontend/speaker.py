"""Reference audio -> speaker vector (spec 2.4): the checkpoint's ONNX file, and the same net, CAM++, in torch.

Shapes: B clips, T Kaldi frames (100 Hz), E embedding size. The vector is raw: its normalisation belongs to the flow.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.errors import EngineUnavailable, GenerationError
from runtime.frontend.mel import KaldiFbank
from runtime.frontend.onnx_file import CPU, OnnxFile
from runtime.frontend.onnx_weights import OnnxLayer, fill, read_layers
from runtime.onnx_export import export_onnx

SEGMENT_FRAMES = 100  # after the first stride: 2 s of sound share one context
HEAD_CHANNELS = 32


class SpeakerEncoder:
    """Runs the checkpoint's `campplus.onnx`. Threads may share it."""

    def __init__(self, path: Path, threads: int = 0, provider: str = CPU, embedding_size: int = 192) -> None:
        self._model = OnnxFile(path, inputs=1, threads=threads, provider=provider)
        self._fbank = KaldiFbank()
        self._embedding_size = embedding_size
        self.identity = self._model.identity

    def embed(self, samples: Tensor) -> Tensor:
        """16 kHz samples [n] -> speaker vector [E] float32. Raises GenerationError when the file breaks its promise."""
        fbank = self._fbank(samples.float().cpu())[None]  # [1, T, 80]
        vector = torch.from_numpy(self._model.run(fbank.numpy()).reshape(-1)).float()
        return _checked(vector, self._embedding_size, self._model.name)


class TorchSpeakerEncoder:
    """The net on a device, with the weights of the ONNX file. Threads may share it."""

    def __init__(self, net: "CAMPPlus", device: torch.device, name: str, embedding_size: int = 192) -> None:
        """`name` is that of the file the weights are from."""
        self._net = net.to(device).eval()
        self._fbank = KaldiFbank(self._net.config.feat_dim).to(device)
        self._embedding_size = embedding_size
        self._device = device
        self._name = name
        self.identity = f"{name}@torch-{device.type}"

    @torch.no_grad()
    def embed(self, samples: Tensor) -> Tensor:
        """As `SpeakerEncoder.embed`; samples may lie on the device."""
        vector = self._net(self._fbank(samples.to(self._device, torch.float32))[None])[0].cpu()
        return _checked(vector, self._embedding_size, self._name)


def _checked(vector: Tensor, size: int, name: str) -> Tensor:
    if len(vector) != size or not vector.isfinite().all():
        raise GenerationError(f"{name} gave a vector of {len(vector)} values; {size} finite ones were due")
    return vector


@dataclass(frozen=True, slots=True)
class CAMPPlusConfig:
    """Sizes of the net; the defaults are the released ones."""

    feat_dim: int = 80
    embedding_size: int = 192
    growth_rate: int = 32
    bn_size: int = 4
    init_channels: int = 128
    blocks: tuple[tuple[int, int], ...] = ((12, 1), (24, 2), (16, 2))  # layers and dilation


class CAMPPlus(nn.Module):
    """Mean-free filter banks [B, T, 80] -> speaker vectors [B, E]."""

    def __init__(self, config: CAMPPlusConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or CAMPPlusConfig()
        self.head = ConvHead()
        self.xvector = nn.Sequential()
        channels = config.init_channels
        self.xvector.add_module("tdnn", TDNN(HEAD_CHANNELS * config.feat_dim // 8, channels))
        for number, (layers, dilation) in enumerate(config.blocks, start=1):
            self.xvector.add_module(f"block{number}", DenseBlock(layers, channels, dilation, config))
            channels += layers * config.growth_rate
            self.xvector.add_module(f"transit{number}", Transit(channels, channels // 2))
            channels //= 2
        self.xvector.add_module("out_nonlinear", NormReLU(channels))
        self.xvector.add_module("stats", StatsPool())
        self.xvector.add_module("dense", Embedding(2 * channels, config.embedding_size))

    def forward(self, fbank: Tensor) -> Tensor:
        return self.xvector(self.head(fbank.transpose(1, 2)))


class ConvHead(nn.Module):
    """Sees the filter bank as a picture and shrinks frequency by eight: [B, 80, T] -> [B, 32 * 10, T]."""

    def __init__(self) -> None:
        super().__init__()
        channels = HEAD_CHANNELS
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.layer1 = nn.Sequential(ResBlock(channels, stride=2), ResBlock(channels, stride=1))
        self.layer2 = nn.Sequential(ResBlock(channels, stride=2), ResBlock(channels, stride=1))
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=(2, 1), padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x[:, None])).relu()
        x = self.layer2(self.layer1(x))
        return self.bn2(self.conv2(x)).relu().flatten(1, 2)


class ResBlock(nn.Module):
    """Two 3 x 3 convolutions with a way around them; the stride is over frequency alone."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride=(stride, 1), padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.append(nn.Conv2d(channels, channels, 1, stride=(stride, 1), bias=False))
            self.shortcut.append(nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + self.shortcut(x)).relu()


class NormReLU(nn.Sequential):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.add_module("batchnorm", nn.BatchNorm1d(channels))
        self.add_module("relu", nn.ReLU())


class TDNN(nn.Module):
    """First layer over time, with stride 2."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Conv1d(channels, out_channels, 5, stride=2, padding=2, bias=False)
        self.nonlinear = NormReLU(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.nonlinear(self.linear(x))


class DenseBlock(nn.Module):
    """Each layer reads all that came before it in the block and adds `growth_rate` channels."""

    def __init__(self, layers: int, channels: int, dilation: int, config: CAMPPlusConfig) -> None:
        super().__init__()
        for number in range(layers):
            layer = DenseLayer(channels + number * config.growth_rate, dilation, config)
            self.add_module(f"tdnnd{number + 1}", layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.cat([x, layer(x)], 1)
        return x


class DenseLayer(nn.Module):
    def __init__(self, channels: int, dilation: int, config: CAMPPlusConfig) -> None:
        super().__init__()
        bottleneck = config.bn_size * config.growth_rate
        self.nonlinear1 = NormReLU(channels)
        self.linear1 = nn.Conv1d(channels, bottleneck, 1, bias=False)
        self.nonlinear2 = NormReLU(bottleneck)
        self.cam_layer = ContextMask(bottleneck, config.growth_rate, dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.cam_layer(self.nonlinear2(self.linear1(self.nonlinear1(x))))


class ContextMask(nn.Module):
    """A convolution whose output is masked by what the whole clip and its 2 s segment sound like."""

    def __init__(self, channels: int, out_channels: int, dilation: int) -> None:
        super().__init__()
        self.linear_local = nn.Conv1d(channels, out_channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.linear1 = nn.Conv1d(channels, channels // 2, 1)
        self.linear2 = nn.Conv1d(channels // 2, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        context = x.mean(-1, keepdim=True) + segment_mean(x)
        mask = self.linear2(self.linear1(context).relu()).sigmoid()
        return self.linear_local(x) * mask


def segment_mean(x: Tensor) -> Tensor:
    """Each frame of [B, C, T] -> mean of its segment; the last segment is as long as it is."""
    means = F.avg_pool1d(x, SEGMENT_FRAMES, SEGMENT_FRAMES, ceil_mode=True)
    repeated = means[..., None].expand(-1, -1, -1, SEGMENT_FRAMES).flatten(-2)
    return repeated[..., : x.shape[-1]]


class Transit(nn.Module):
    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.nonlinear = NormReLU(channels)
        self.linear = nn.Conv1d(channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.nonlinear(x))


class StatsPool(nn.Module):
    """Mean and unbiased deviation over time: [B, C, T] -> [B, 2C]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean(-1), x.std(-1)], -1)


class Embedding(nn.Module):
    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Conv1d(channels, size, 1, bias=False)
        self.nonlinear = nn.Sequential()
        self.nonlinear.add_module("batchnorm", nn.BatchNorm1d(size, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.nonlinear(self.linear(x[..., None])[..., 0])


def export_speaker_encoder(net: CAMPPlus, path: Path) -> None:
    """Writes the net as an ONNX file with the released interface: one clip of any length."""
    fbank = torch.zeros(1, 350, net.config.feat_dim, device=next(net.parameters()).device)
    free = {1: torch.export.Dim("frames", min=8, max=30_000)}
    export_onnx(net, path, {"input": fbank}, output="output", dynamic=[free])


def net_of(path: Path) -> CAMPPlus:
    """The net with the weights of an ONNX file, on the CPU. Raises EngineUnavailable when they do not fit."""
    layers = read_layers(path)
    config = _config_of([layer for layer in layers if layer.kind == "conv" and layer.arrays[0].ndim == 3], path.name)
    with torch.device("meta"):
        net = CAMPPlus(config).eval()
    fill(net, layers, lambda net: net(torch.zeros(1, SEGMENT_FRAMES, config.feat_dim)))
    return net.eval().requires_grad_(False)


def _config_of(convs: list[OnnxLayer], name: str) -> CAMPPlusConfig:
    """Sizes from the convolutions over time: the first, four to a dense layer, one behind each block, the last."""
    shapes = [conv.arrays[0].shape for conv in convs]
    local = [index for index, shape in enumerate(shapes) if shape[2] == 3]
    if not local or shapes[0][2] != 5:
        raise EngineUnavailable(f"{name} has another architecture: its convolutions over time are {shapes[:4]}")
    growth, bottleneck, _ = shapes[local[0]]
    blocks: list[tuple[int, int]] = []
    before = 0
    for index in local:  # the way into a dense layer is the nearest product before it that is as wide as it reads
        into = [shape for shape in shapes[:index] if shape[2] == 1 and shape[0] == bottleneck]
        if not into:
            raise EngineUnavailable(f"{name} has another architecture: a dense layer has no way in")
        channels = into[-1][1]
        dilation = convs[index].geometry[1][0]  # type: ignore[index]
        if channels == before + growth and blocks:
            blocks[-1] = (blocks[-1][0] + 1, dilation)
        else:
            blocks.append((1, dilation))
        before = channels
    feat_dim = shapes[0][1] * 8 // HEAD_CHANNELS
    return CAMPPlusConfig(feat_dim, shapes[-1][0], growth, bottleneck // growth, shapes[0][0], tuple(blocks))
