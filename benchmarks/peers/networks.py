"""The networks that all simulators train: field.py's CNN on images, workload.py's MLP on rows."""

from itertools import pairwise

import torch
from torch import nn


def cnn(channels, side, classes):
    """Of Reddi et al. (2021), as pfl-research and fedjax have it in their benchmarks."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((side - 4) // 2) ** 2, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


def network_of(data):
    """The network of a problem's file, with its initial model where the file has one."""
    x, classes = data["x"], int(data["y"].max()) + 1
    if x.ndim == 4:
        return cnn(x.shape[1], x.shape[2], classes)
    layers, hidden = [], data["hidden"].tolist()
    for a, b in pairwise((x.shape[1], *hidden)):
        layers += [nn.Linear(a, b), nn.GroupNorm(1, b), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(hidden[-1], classes))
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.from_numpy(data["start"]), net.parameters())
    return net
