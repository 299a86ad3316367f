"""A problem on pfl-research. Run in its own environment: run_pfl.py PROBLEM.npz USERS COHORT ROUNDS CORES DEVICE.

With several cores torchrun starts it once for each.
"""

import json
import os
import sys

import numpy as np
import torch

if sys.argv[6] != "cpu" and int(sys.argv[5]) > 1:  # its processes share one GPU, but it and NCCL want one for each
    os.environ["PFL_PYTORCH_DEVICE"] = "cuda:0"
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **more: begin(backend="gloo", **more)
    torch.cuda.set_device = lambda device: None

from clock import now
from networks import network_of
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

path, (users, cohort, rounds, cores), device = sys.argv[1], map(int, sys.argv[2:6]), sys.argv[6]
torch.set_num_threads(1)
data = np.load(path)
x, y = torch.from_numpy(data["x"]).to(device), torch.from_numpy(data["y"]).to(device)
parts = np.array_split(data["order"], users)
rng = np.random.default_rng()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network_of(data)

    def forward(self, inputs):
        return self.net(inputs)

    def loss(self, inputs, targets, eval=False):
        return F.cross_entropy(self(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs, targets, eval=False):
        return {"loss": Weighted(float(F.cross_entropy(self(inputs), targets, reduction="sum")), len(targets))}


class Clock(TrainingProcessCallback):
    def __init__(self):
        self.times = [now()]

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if device != "cpu":
            torch.cuda.synchronize()
        self.times.append(now())
        return False, Metrics()


net = Net().to(device)
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
turn = iter(range(10**9))
sets = FederatedDataset(
    lambda k: Dataset((x[shuffled := rng.permutation(parts[k])], y[shuffled]), user_id=str(k)),
    lambda: next(turn) % users,
)
clock = Clock()
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=cohort, val_cohort_size=0
    ),
    SimulatedBackend(sets, sets, postprocessors=[WeightByDatapoints()]),
    model,
    NNTrainHyperParams(local_batch_size=int(data["batch"]), local_num_epochs=1, local_learning_rate=float(data["lr"])),
    NNEvalHyperParams(local_batch_size=1024),
    callbacks=[clock],
)
net.eval()
with torch.no_grad():
    loss = np.mean([float(F.cross_entropy(net(a), b)) for a, b in zip(x.split(1024), y.split(1024), strict=True)])
if int(os.environ.get("RANK", "0")) == 0:
    print("RESULT " + json.dumps({"seconds": np.diff(clock.times).tolist(), "loss": float(loss)}), flush=True)
