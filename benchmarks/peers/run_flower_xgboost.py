"""XGBoost by bagging on Flower's simulation, as its documentation has it, in its own environment (`trees.py peers`):
run_flower_xgboost.py SITES.npz ROUNDS OUT.npz.

Every round each site boosts one tree from the global model, and FedXgbBagging adds all sites' trees to it. It is for
two classes: the strategy puts every tree into class 0."""

import json
import sys
import time

import numpy as np
import xgboost as xgb
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedXgbBagging
from flwr.simulation import run_simulation

PATH, ROUNDS, OUT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
DATA = dict(np.load(PATH))
SITES = int(DATA["site"].max()) + 1
PARAMS = {"objective": "binary:logistic", "eval_metric": "auc", "eta": 0.1, "max_depth": 8, "tree_method": "hist"}
PARAMS |= {"num_parallel_tree": 1, "nthread": 1}


def matrix(rows: np.ndarray) -> xgb.DMatrix:
    return xgb.DMatrix(DATA["x"][rows], DATA["y"][rows], feature_types=list(DATA["types"]), enable_categorical=True)


client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    rows = (DATA["part"] == 0) & (DATA["site"] == int(context.node_config["partition-id"]))
    known, data = message.content["arrays"]["0"].numpy().tobytes(), matrix(rows)
    if known:
        booster = xgb.Booster(params=PARAMS)
        booster.load_model(bytearray(known))
        booster.update(data, booster.num_boosted_rounds())
        booster = booster[booster.num_boosted_rounds() - 1 :]
    else:
        booster = xgb.train(PARAMS, data, 1)
    arrays = ArrayRecord([np.frombuffer(booster.save_raw("json"), dtype=np.uint8)])
    metrics = MetricRecord({"num-examples": int(rows.sum())})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class Counted(FedXgbBagging):
    """Counts the bytes of models, down and up."""

    sent = 0

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.sent += len(messages) * arrays["0"].numpy().nbytes
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.sent += sum(reply.content["arrays"]["0"].numpy().nbytes for reply in replies if reply.has_content())
        return super().aggregate_train(server_round, replies)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Counted(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=SITES, min_available_nodes=SITES)
    began = time.perf_counter()
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(0, np.uint8)]), num_rounds=ROUNDS)
    seconds = time.perf_counter() - began
    booster = xgb.Booster(params=PARAMS)
    booster.load_model(bytearray(result.arrays["0"].numpy().tobytes()))
    np.savez(OUT, held=booster.predict(matrix(DATA["part"] == 1)), test=booster.predict(matrix(DATA["part"] == 2)))
    print("RESULT " + json.dumps({"seconds": seconds, "bytes": strategy.sent}), flush=True)


run_simulation(
    server_app=server_app,
    client_app=client_app,
    num_supernodes=SITES,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
)
