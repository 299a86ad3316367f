"""scikit-learn's 8x8 handwritten digits, made long-tailed: the embedded default, no download."""

from __future__ import annotations

import numpy as np
import torch

from fedtail.core.random import generator
from fedtail.data.federation import Samples, Transform, stratified_holdout
from fedtail.data.longtail import long_tail_index
from fedtail.data.registry import DATASETS, Pooled


@DATASETS.add("digits")
def digits(imbalance: float = 20.0, test_fraction: float = 0.3, seed: int = 0) -> Pooled:
    """1,797 images of ten digits; a balanced ``test_fraction`` is held out, the rest follows the long-tail profile."""
    from sklearn.datasets import load_digits  # 1 s to import: not for commands that do not need it

    raw = load_digits()
    x = torch.as_tensor(raw.images, dtype=torch.float32).unsqueeze(1)
    y = np.asarray(raw.target, dtype=np.int64)
    train, test = stratified_holdout(y, np.arange(len(y)), test_fraction, generator(seed, "digits/test"))
    train = train[long_tail_index(y[train], imbalance, n_classes=10, seed=seed)]
    labels = torch.as_tensor(y)
    return Pooled(
        Samples(x[train], labels[train]),
        Samples(x[test], labels[test]),
        classes=tuple(str(c) for c in range(10)),
        name="digits",
        transform=Transform(scale=1 / 16, mean=(0.3,), std=(0.38,)),
        model="mlp",
        model_options={"hidden": (64, 32)},
    )
