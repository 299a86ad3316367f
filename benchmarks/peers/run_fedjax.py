"""A problem on fedjax. Run in its own environment: run_fedjax.py PROBLEM.npz USERS COHORT ROUNDS CORES DEVICE."""

import json
import os
import sys
from itertools import pairwise

path, (users, cohort, rounds, cores), device = sys.argv[1], map(int, sys.argv[2:6]), sys.argv[6]
if device == "cpu":  # its own way to use several devices, pmap, does not run on the jax of today
    threads = f"--xla_cpu_multi_thread_eigen={str(cores > 1).lower()} intra_op_parallelism_threads={cores}"
    os.environ["XLA_FLAGS"] = threads

import jax  # noqa: E402
import numpy as np  # noqa: E402
from clock import now  # noqa: E402

for name in ("tree_map", "tree_leaves", "tree_structure", "tree_unflatten"):  # fedjax 0.0.17 uses names jax has moved
    if not hasattr(jax, name):
        setattr(jax, name, getattr(jax.tree_util, name))

import fedjax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

data = np.load(path)
x, y = data["x"], data["y"].astype(np.int32)
parts, classes, images = np.array_split(data["order"], users), int(data["y"].max()) + 1, data["x"].ndim == 4
rng = np.random.default_rng(0)


def weights(*shape):
    return jnp.asarray(rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[:-1])), dtype=jnp.float32)


def of_images():
    flat = 64 * ((x.shape[1] - 4) // 2) ** 2
    shapes = ((3, 3, x.shape[3], 32), (3, 3, 32, 64), (flat, 128), (128, classes))
    return [(weights(*s), jnp.zeros(s[-1])) for s in shapes]


def of_rows(v, widths):
    """torch's order: weight (out, in), bias, then GroupNorm weight and bias, layer by layer."""
    params, at = [], 0
    for i, (a, b) in enumerate(pairwise(widths)):
        shapes = [(b, a), (b,)] + ([(b,), (b,)] if i < len(widths) - 2 else [])
        layer = []
        for shape in shapes:
            size = int(np.prod(shape))
            layer.append(jnp.asarray(v[at : at + size]).reshape(shape))
            at += size
        params.append(layer)
    return params


def convolved(h, layer):
    out = jax.lax.conv_general_dilated(h, layer[0], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(out + layer[1])


def dropped(h, rate, key):
    return h if key is None else jnp.where(jax.random.bernoulli(key, 1 - rate, h.shape), h / (1 - rate), 0.0)


def cnn(params, h, key):
    one, two = (None, None) if key is None else jax.random.split(key)
    h = convolved(convolved(h, params[0]), params[1])
    h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = dropped(h, 0.25, one).reshape(h.shape[0], -1)
    h = dropped(jax.nn.relu(h @ params[2][0] + params[2][1]), 0.5, two)
    return h @ params[3][0] + params[3][1]


def mlp(params, h, key):
    for weight, bias, *norm in params:
        h = h @ weight.T + bias
        if norm:
            mean, var = h.mean(-1, keepdims=True), h.var(-1, keepdims=True)
            h = jax.nn.relu((h - mean) / jnp.sqrt(var + 1e-5) * norm[0] + norm[1])
    return h


def loss(params, batch, key):
    log_p = jax.nn.log_softmax((cnn if images else mlp)(params, batch["x"], key))
    return -jnp.take_along_axis(log_p, batch["y"][:, None], 1).mean()


if images:
    x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
params = of_images() if images else of_rows(data["start"], [x.shape[1], *data["hidden"].tolist(), classes])
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    lambda params, batch, key: jax.grad(loss)(params, batch, key),
    fedjax.optimizers.sgd(float(data["lr"])),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=int(data["batch"]), num_epochs=1, drop_remainder=False),
)
state, seconds = algorithm.init(params), []
for t in range(rounds):
    chosen = [(t * cohort + i) % users for i in range(cohort)]
    keys = jax.random.split(jax.random.PRNGKey(t), cohort)
    began = now()
    sets = [fedjax.ClientDataset({"x": x[parts[k]], "y": y[parts[k]]}) for k in chosen]
    state, _ = algorithm.apply(state, [(str(k), s, keys[i]) for i, (k, s) in enumerate(zip(chosen, sets, strict=True))])
    jax.block_until_ready(state.params)
    seconds.append(now() - began)
rows = [slice(i, i + 1024) for i in range(0, len(y), 1024)]
final = np.mean([float(loss(state.params, {"x": jnp.asarray(x[s]), "y": jnp.asarray(y[s])}, None)) for s in rows])
print("RESULT " + json.dumps({"seconds": seconds, "loss": float(final)}), flush=True)
