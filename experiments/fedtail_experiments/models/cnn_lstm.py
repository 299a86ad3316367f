"""CNN-LSTM for long feature vectors: the paper's model for UNSW-NB15."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedtail.errors import FedtailError
from fedtail.simulate.batched.layers import Layer, Linear, ReLU, Shape
from fedtail.simulate.batched.network import LAYERS
from fedtail_experiments.models.sequences import Conv1d, Fold, Lstm, MaxPool1d


class CnnLstm(nn.Module):
    """Conv1d-ReLU-MaxPool blocks along the features, an LSTM over what is left of them, linear output.

    x: (N, length) or (N, channels, length).
    """

    def __init__(self, in_channels: int, n_classes: int, channels: Sequence[int], hidden: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        layers: list[nn.Module] = []
        width = in_channels
        for out in channels:
            layers += [nn.Conv1d(width, out, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2)]
            width = out
        self.blocks = nn.Sequential(*layers)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.output = nn.Linear(hidden, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).unflatten(1, (self.in_channels, -1))  # both shapes without a branch, which is not traced
        steps, _ = self.lstm(self.blocks(x).transpose(1, 2))
        return self.output(steps[:, -1])


def cnn_lstm(
    input_shape: tuple[int, ...], n_classes: int, channels: Sequence[int] = (128, 256, 512), hidden: int = 128
) -> nn.Module:
    """CNN-LSTM: 822,794 parameters for 196 features and 10 classes.

    ``channels``: of the convolution blocks, each of which halves the length; ``hidden``: LSTM width.
    """
    if len(input_shape) not in (1, 2):
        raise FedtailError(f"cnn_lstm takes (length,) or (channels, length), not samples of shape {input_shape}")
    length = input_shape[-1]
    if length < 2 ** len(channels):
        raise FedtailError(
            f"cnn_lstm halves the length {len(channels)} times, so it needs {2 ** len(channels)} features or more, "
            f"not {length}; use the model 'mlp'"
        )
    return CnnLstm(input_shape[0] if len(input_shape) == 2 else 1, n_classes, channels, hidden)


def layers(module: nn.Module, shape: Shape) -> list[Layer]:
    """The network of many clients at once, for samples of a shape."""
    assert isinstance(module, CnnLstm)
    out: list[Layer] = [Fold(shape, module.in_channels)]
    for block in module.blocks:
        width, length = out[-1].out
        if isinstance(block, nn.Conv1d):
            out.append(Conv1d(width, block.out_channels, 3, length, bias=True))
        else:
            out.append(ReLU(out[-1].out, inplace=True) if isinstance(block, nn.ReLU) else MaxPool1d(out[-1].out))
    lstm, output = module.lstm, module.output
    out.append(Lstm(lstm.input_size, lstm.hidden_size, out[-1].out[1]))
    return [*out, Linear(output.in_features, output.out_features, True)]


LAYERS[CnnLstm] = layers
