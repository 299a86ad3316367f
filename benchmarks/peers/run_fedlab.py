"""A problem on FedLab's standalone pipeline, in its own environment:
run_fedlab.py PROBLEM.npz USERS COHORT ROUNDS CORES DEVICE."""

import json
import logging
import sys

import numpy as np
import torch
from clock import now
from networks import network_of
from torch.nn import functional as F
from torchvision_stub import without_torchvision

without_torchvision()
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402

logging.disable(logging.CRITICAL)
path, (users, cohort, rounds, _cores), device = sys.argv[1], map(int, sys.argv[2:6]), sys.argv[6]
torch.set_num_threads(1)
data = np.load(path)
x, y = torch.from_numpy(data["x"]).to(device), torch.from_numpy(data["y"]).to(device)
parts, rng, times = np.array_split(data["order"], users), np.random.default_rng(), [now()]


class Users:
    def get_dataloader(self, k, batch):
        return ((x[rows], y[rows]) for rows in torch.from_numpy(rng.permutation(parts[k])).split(batch))


class Timed(StandalonePipeline):
    def evaluate(self):
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(now())


net, cuda = network_of(data), device != "cpu"
server = FedAvgServerHandler(net, rounds, cohort / users, cuda)
trainer = FedAvgSerialClientTrainer(net, users, cuda)
trainer.setup_dataset(Users())
trainer.setup_optim(1, int(data["batch"]), float(data["lr"]))
Timed(server, trainer).main()
model = server.model.eval()
with torch.no_grad():
    loss = np.mean([float(F.cross_entropy(model(a), b)) for a, b in zip(x.split(1024), y.split(1024), strict=True)])
print("RESULT " + json.dumps({"seconds": np.diff(times).tolist(), "loss": float(loss)}), flush=True)
