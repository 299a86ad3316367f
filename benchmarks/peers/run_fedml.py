"""A problem on FedML's single-process simulator, in its own environment:
run_fedml.py PROBLEM.npz USERS COHORT ROUNDS CORES DEVICE."""

import json
import logging
import sys
from types import SimpleNamespace

import numpy as np
import torch
from clock import now
from networks import network_of
from torch.nn import functional as F
from torchvision_stub import without_torchvision

without_torchvision()
from fedml import mlops  # noqa: E402
from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI  # noqa: E402

logging.disable(logging.CRITICAL)
path, (users, cohort, rounds, _cores), device = sys.argv[1], map(int, sys.argv[2:6]), sys.argv[6]
torch.set_num_threads(1)
data = np.load(path)
x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
batch, rng = int(data["batch"]), np.random.default_rng()
parts, times = np.array_split(data["order"], users), []


class Shuffled:
    """A user's batches, in a new order every time."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return -(-len(self.rows) // batch)

    def __iter__(self):
        return ((x[rows], y[rows]) for rows in torch.from_numpy(rng.permutation(self.rows)).split(batch))


for name in ("event", "log", "log_training_status", "log_aggregation_status", "log_training_finished_status"):
    setattr(mlops, name, lambda *args, **kwargs: None)  # they report to a platform
mlops.log_aggregation_finished_status = lambda: None
mlops.log_round_info = lambda total, done: times.append(now())
FedAvgAPI._local_test_on_all_clients = lambda self, round_idx: None  # what is timed is training
args = SimpleNamespace(
    client_num_in_total=users, client_num_per_round=cohort, comm_round=rounds, frequency_of_the_test=10**9, epochs=1,
    client_optimizer="sgd", learning_rate=float(data["lr"]), batch_size=batch, dataset="noise",
    federated_optimizer="FedAvg", enable_dp_ldp=False, role="client", rank=0,
)  # fmt: skip
local, sizes = {k: Shuffled(p) for k, p in enumerate(parts)}, {k: len(p) for k, p in enumerate(parts)}
net = network_of(data)
dataset = [len(x), 0, None, None, sizes, local, dict.fromkeys(range(users)), int(y.max()) + 1]
FedAvgAPI(args, torch.device(device), dataset, net).train()
net.to(device).eval()
with torch.no_grad():
    pairs = zip(x.to(device).split(1024), y.to(device).split(1024), strict=True)
    loss = np.mean([float(F.cross_entropy(net(a), b)) for a, b in pairs])
print("RESULT " + json.dumps({"seconds": np.diff(times).tolist(), "loss": float(loss)}), flush=True)
