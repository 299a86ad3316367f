"""The shapes of field.py on pfl-research. Run in its own environment:
field_pfl.py PROBLEM.npz COHORT ROUNDS CORES DEVICE."""

import json
import os
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional as F

path, cohort, rounds, device = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
torch.set_num_threads(1)
data = np.load(path)
x, y = torch.from_numpy(data["x"]).to(device), torch.from_numpy(data["y"]).to(device)
parts, classes = data["parts"], int(data["y"].max()) + 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        channels, side = x.shape[1], x.shape[2]
        self.net = nn.Sequential(
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
        if device != "cpu":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return False, Metrics()


net = Net().to(device)
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
users = FederatedDataset(
    lambda k: Dataset((x[parts[k]], y[parts[k]]), user_id=str(k)), get_user_sampler("random", list(range(len(parts))))
)
clock = Clock()
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=cohort, val_cohort_size=0
    ),
    SimulatedBackend(users, users),
    model,
    NNTrainHyperParams(local_batch_size=10, local_num_epochs=1, local_learning_rate=float(data["lr"])),
    NNEvalHyperParams(local_batch_size=1024),
    callbacks=[clock],
)
if int(os.environ.get("RANK", "0")) == 0:
    print("RESULT " + json.dumps(np.diff(clock.times).tolist()), flush=True)
