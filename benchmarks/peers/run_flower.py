"""A problem on Flower's Ray simulation, in its own environment:
run_flower.py PROBLEM.npz USERS COHORT ROUNDS CORES DEVICE."""

import json
import sys
import time

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from networks import network_of
from torch.nn import functional as F

PATH, (USERS, COHORT, ROUNDS, CORES), DEVICE = sys.argv[1], map(int, sys.argv[2:6]), sys.argv[6]
LOADED = {}


def problem():
    """Samples, labels, parts and network; read once per process."""
    if not LOADED:
        torch.set_num_threads(1)
        data = np.load(PATH)
        LOADED.update(
            x=torch.from_numpy(data["x"]).to(DEVICE),
            y=torch.from_numpy(data["y"]).to(DEVICE),
            parts=np.array_split(data["order"], USERS),
            net=network_of(data).to(DEVICE),
            lr=float(data["lr"]),
            batch=int(data["batch"]),
        )
    return LOADED


client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    data = problem()
    net = data["net"].train()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    part = data["parts"][int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(net.parameters(), lr=data["lr"])
    for batch in torch.from_numpy(np.random.default_rng().permutation(part)).split(data["batch"]):
        optimizer.zero_grad()
        F.cross_entropy(net(data["x"][batch]), data["y"][batch]).backward()
        optimizer.step()
    content = RecordDict(
        {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(part)})}
    )
    return Message(content=content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    data = problem()
    net, clock = data["net"], []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        clock.append(time.perf_counter())
        return MetricRecord({"round": server_round})

    strategy = FedAvg(
        fraction_train=COHORT / USERS, fraction_evaluate=0.0, min_available_nodes=USERS, min_train_nodes=COHORT
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        num_rounds=ROUNDS,
        evaluate_fn=evaluate,
        train_config=ConfigRecord(),
    )
    net.load_state_dict(result.arrays.to_torch_state_dict())
    net.eval()
    with torch.no_grad():
        parts = zip(data["x"].split(1024), data["y"].split(1024), strict=True)
        loss = np.mean([float(F.cross_entropy(net(x), y)) for x, y in parts])
    print("RESULT " + json.dumps({"seconds": np.diff(clock).tolist(), "loss": float(loss)}), flush=True)


run_simulation(
    server_app=server_app,
    client_app=client_app,
    num_supernodes=USERS,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": CORES}},
)
