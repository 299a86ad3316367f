"""The common workload on pfl-research. Run in its own environment: run_pfl.py PROBLEM.npz K ROUNDS CORES.

With several cores torchrun starts it once for each.
"""

import json
import os
import sys
import time
from itertools import pairwise

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional as F

path, clients, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
data = np.load(path)
x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
parts = np.array_split(data["order"], clients)
rng = np.random.default_rng()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = []
        hidden = data["hidden"].tolist()
        for a, b in pairwise((x.shape[1], *hidden)):
            layers += [nn.Linear(a, b), nn.GroupNorm(1, b), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(hidden[-1], 2))

    def forward(self, inputs):
        return self.net(inputs)

    def loss(self, inputs, targets, eval=False):
        return F.cross_entropy(self(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs, targets, eval=False):
        return {"loss": Weighted(float(F.cross_entropy(self(inputs), targets, reduction="sum")), len(targets))}


class Clock(TrainingProcessCallback):
    def __init__(self):
        self.times = [time.perf_counter()]

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.times.append(time.perf_counter())
        return False, Metrics()


net = Net()
with torch.no_grad():
    nn.utils.vector_to_parameters(torch.from_numpy(data["start"]), net.parameters())
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
turn = iter(range(10**9))
users = FederatedDataset(
    lambda k: Dataset((x[shuffled := rng.permutation(parts[k])], y[shuffled]), user_id=str(k)),
    lambda: next(turn) % clients,
)
clock = Clock()
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=clients, val_cohort_size=0
    ),
    SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
    model,
    NNTrainHyperParams(local_batch_size=64, local_num_epochs=1, local_learning_rate=0.1),
    NNEvalHyperParams(local_batch_size=1024),
    callbacks=[clock],
)
with torch.no_grad():
    loss = float(F.cross_entropy(net(x), y))
if int(os.environ.get("RANK", "0")) == 0:
    print("RESULT " + json.dumps({"seconds": np.diff(clock.times).tolist(), "loss": loss}), flush=True)
