from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from fedtail.data import DATASETS, Federation, partition
from fedtail.models import build_model

torch.set_num_threads(1)
settings.register_profile("fedtail", deadline=None, derandomize=True)
settings.load_profile("fedtail")


def blob_federation(clients: int = 4, seed: int = 0, **options: object) -> Federation:
    """A small long-tailed federation that trains in milliseconds."""
    pool = DATASETS.build("blobs", **{"n_max": 60, "imbalance": 10.0, "test_per_class": 20, "seed": seed, **options})
    return partition(pool.train, pool.test, clients=clients, alpha=1.0, validation=0.2, seed=seed, auxiliary=3)


@pytest.fixture
def federation() -> Federation:
    return blob_federation()


@pytest.fixture
def module(federation: Federation) -> torch.nn.Module:
    return build_model("mlp", federation.input_shape, federation.n_classes, hidden=(16, 8))
