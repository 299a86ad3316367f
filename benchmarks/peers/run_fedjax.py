"""The common workload on fedjax. Run in its own environment: run_fedjax.py PROBLEM.npz K ROUNDS CORES."""

import json
import os
import sys
import time
from itertools import pairwise

cores = int(sys.argv[4])
if cores == 1:
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
else:  # its own way to use several devices, pmap, does not run on the jax of today
    os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads={cores}"

import jax  # noqa: E402
import numpy as np  # noqa: E402

for name in ("tree_map", "tree_leaves", "tree_structure", "tree_unflatten"):  # fedjax 0.0.17 uses names jax has moved
    if not hasattr(jax, name):
        setattr(jax, name, getattr(jax.tree_util, name))

import fedjax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

path, clients, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = np.load(path)
x, y = data["x"], data["y"]
parts = np.array_split(data["order"], clients)
widths = [x.shape[1], *data["hidden"].tolist(), 2]


def unflatten(v):
    """torch's order: weight (out, in), bias, then GroupNorm weight and bias, layer by layer."""
    params, at = [], 0
    for i, (a, b) in enumerate(pairwise(widths)):
        shapes = [(b, a), (b,)] + ([(b,), (b,)] if i < 3 else [])
        layer = []
        for shape in shapes:
            size = int(np.prod(shape))
            layer.append(jnp.asarray(v[at : at + size]).reshape(shape))
            at += size
        params.append(layer)
    return params


def logits(params, inputs):
    h = inputs
    for weight, bias, *norm in params:
        h = h @ weight.T + bias
        if norm:
            mean, var = h.mean(-1, keepdims=True), h.var(-1, keepdims=True)
            h = jax.nn.relu((h - mean) / jnp.sqrt(var + 1e-5) * norm[0] + norm[1])
    return h


def loss(params, batch):
    log_p = jax.nn.log_softmax(logits(params, batch["x"]))
    return -jnp.take_along_axis(log_p, batch["y"][:, None], 1).mean()


algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    lambda params, batch, rng: jax.grad(loss)(params, batch),
    fedjax.optimizers.sgd(0.1),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=64, num_epochs=1, drop_remainder=False),
)
sets = [fedjax.ClientDataset({"x": x[p], "y": y[p].astype(np.int32)}) for p in parts]
state = algorithm.init(unflatten(data["start"]))
seconds = []
for t in range(rounds):
    keys = jax.random.split(jax.random.PRNGKey(t), clients)
    began = time.perf_counter()
    state, _ = algorithm.apply(state, [(str(k), s, keys[k]) for k, s in enumerate(sets)])
    jax.block_until_ready(state.params)
    seconds.append(time.perf_counter() - began)
final = float(loss(state.params, {"x": jnp.asarray(x), "y": jnp.asarray(y)}))
print("RESULT " + json.dumps({"seconds": seconds, "loss": final}), flush=True)
