"""The common workload on Flower's Ray simulation, in its own environment: run_flower.py PROBLEM.npz K ROUNDS CORES."""

import json
import sys
import time
from itertools import pairwise

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional as F

PATH, CLIENTS, ROUNDS, CORES = sys.argv[1], *map(int, sys.argv[2:5])
LOADED = {}


def problem():
    """Rows, labels, parts and initial model; read once per process."""
    if not LOADED:
        torch.set_num_threads(1)
        data = np.load(PATH)
        LOADED.update(
            x=torch.from_numpy(data["x"]),
            y=torch.from_numpy(data["y"]),
            parts=np.array_split(data["order"], CLIENTS),
            start=torch.from_numpy(data["start"]),
            hidden=data["hidden"].tolist(),
        )
    return LOADED


def mlp(width, hidden):
    layers = []
    for a, b in pairwise((width, *hidden)):
        layers += [nn.Linear(a, b), nn.GroupNorm(1, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 2))


client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    data = problem()
    module = mlp(data["x"].shape[1], data["hidden"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    part = data["parts"][int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    order = torch.from_numpy(np.random.default_rng().permutation(part))
    for i in range(0, len(order), 64):
        batch = order[i : i + 64]
        optimizer.zero_grad()
        F.cross_entropy(module(data["x"][batch]), data["y"][batch]).backward()
        optimizer.step()
    content = RecordDict(
        {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": len(part)})}
    )
    return Message(content=content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    data = problem()
    module = mlp(data["x"].shape[1], data["hidden"])
    with torch.no_grad():
        nn.utils.vector_to_parameters(data["start"], module.parameters())
    clock = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        clock.append(time.perf_counter())
        return MetricRecord({"round": server_round})

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS, min_train_nodes=CLIENTS)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(module.state_dict()),
        num_rounds=ROUNDS,
        evaluate_fn=evaluate,
        train_config=ConfigRecord(),
    )
    module.load_state_dict(result.arrays.to_torch_state_dict())
    with torch.no_grad():
        loss = float(F.cross_entropy(module(data["x"]), data["y"]))
    print("RESULT " + json.dumps({"seconds": np.diff(clock).tolist(), "loss": loss}), flush=True)


run_simulation(
    server_app=server_app,
    client_app=client_app,
    num_supernodes=CLIENTS,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": CORES}},
)
