"""What methods ask of each client's training samples: sums over losses, and over features, class by class.

Features are the inputs of a model's output layer. losses: (n,); features: (n, d); logits: (n, C); y: (n,) labels.
Everything is in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtail.core.records import Measurement

PIECE = 64
"""Samples whose features are compared with each other."""


class Moments(NamedTuple):
    """Samples, means and covariances of the features of each class."""

    counts: Tensor
    """(C,)"""
    means: Tensor
    """(C, d)"""
    covariances: Tensor
    """(C, d, d), divided by n - 1; zero for a single sample."""

    def packed(self) -> Tensor:
        """(C, 1 + d + d d): one tensor to send."""
        return torch.cat([self.counts.unsqueeze(1), self.means, self.covariances.flatten(1)], 1)

    @classmethod
    def unpacked(cls, sent: Tensor) -> Moments:
        d = round((-1 + (1 + 4 * (sent.shape[1] - 1)) ** 0.5) / 2)
        return cls(sent[:, 0], sent[:, 1 : 1 + d], sent[:, 1 + d :].reshape(len(sent), d, d))


def class_moments(features: Tensor, y: Tensor, n_classes: int) -> Moments:
    """The moments of each class; those of a class without samples are 0."""
    f = features.double()
    d = f.shape[1]
    means, covariances = class_means(f, y, n_classes), f.new_zeros(n_classes, d, d)
    for c in torch.unique(y).tolist():
        off = f[y == c] - means[c]
        covariances[c] = off.T @ off / max(len(off) - 1, 1)
    return Moments(torch.bincount(y, minlength=n_classes).to(f), means, covariances)


def merged_moments(parts: list[Moments]) -> Moments:
    """The moments of all clients' samples together, from those of each, exactly."""
    counts = torch.stack([p.counts for p in parts]).sum(0)
    n = counts.clamp_min(1.0)
    means = torch.stack([p.counts.unsqueeze(1) * p.means for p in parts]).sum(0) / n.unsqueeze(1)
    total = torch.zeros_like(parts[0].covariances)
    for p in parts:
        off = p.means - means
        total += (p.counts - 1).clamp_min(0.0).view(-1, 1, 1) * p.covariances
        total += p.counts.view(-1, 1, 1) * torch.einsum("ci,cj->cij", off, off)
    return Moments(counts, means, total / (counts - 1).clamp_min(1.0).view(-1, 1, 1))


def class_gradients(
    features: Tensor, logits: Tensor, y: Tensor, n_classes: int, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """(C, C, d + 1): mean gradient of cross-entropy over each class's samples with respect to a linear output layer's
    weight, and in the last column its bias."""
    pull = torch.softmax(logits.to(dtype), 1)
    pull[torch.arange(len(y)), y] -= 1.0
    out = pull.new_full((n_classes, logits.shape[1], features.shape[1] + 1), float("nan"))
    for c in torch.unique(y).tolist():
        members = y == c
        own = pull[members].T / int(members.sum())
        out[c, :, :-1], out[c, :, -1] = own @ features[members].to(dtype), own.sum(1)
    return out


def effective_numbers(features: Tensor, y: Tensor, n_classes: int) -> Tensor:
    """(C,) effective number of samples of each class: 1 over the mean cosine of all pairs of its centred features, at
    most the number of samples; in pieces of ``PIECE`` samples, summed. 0 for a class without samples.

    Features that all lie the same way from their mean count as one, n orthogonal ones as n.
    """
    f = features.double()
    out = f.new_zeros(n_classes)
    means = class_means(f, y, n_classes)
    for part, labels in zip((f - means[y]).split(PIECE), y.split(PIECE), strict=True):
        unit = torch.nn.functional.normalize(part, dim=1)
        sums = f.new_zeros(n_classes, f.shape[1]).index_add_(0, labels, unit)
        n = torch.bincount(labels, minlength=n_classes).to(f)
        out += torch.minimum(n * n / sums.square().sum(1).clamp_min(1e-12), n)  # mean cosine = |sum|^2 / n^2
    return out


def class_means(features: Tensor, y: Tensor, n_classes: int) -> Tensor:
    """(C, d), 0 for a class without samples."""
    sums = features.new_zeros(n_classes, features.shape[1]).index_add_(0, y, features)
    return sums / torch.bincount(y, minlength=n_classes).clamp_min(1).to(features).unsqueeze(1)


def train_loss(losses: Tensor, y: Tensor, n_classes: int) -> Tensor:
    """The mean loss."""
    return torch.tensor(np.bincount(np.zeros(len(losses), dtype=np.int64), losses.numpy())[0] / len(losses))


def class_loss(losses: Tensor, y: Tensor, n_classes: int) -> Tensor:
    """(C,) mean loss of each class, NaN for a class without samples."""
    with np.errstate(invalid="ignore"):
        sums = np.bincount(y.numpy(), losses.numpy(), n_classes)
        return torch.from_numpy(sums / np.bincount(y.numpy(), minlength=n_classes))


TRAIN_LOSS = Measurement("train_loss", train_loss)
CLASS_LOSS = Measurement("class_loss", class_loss)
CLASS_MOMENTS = Measurement("class_moments", lambda f, _, y, c: class_moments(f, y, c).packed(), of_features=True)
CLASS_GRADIENTS = Measurement("class_gradients", class_gradients, of_features=True)
EFFECTIVE_NUMBERS = Measurement("effective_numbers", lambda f, _, y, c: effective_numbers(f, y, c), of_features=True)
