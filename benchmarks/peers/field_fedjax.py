"""The shapes of field.py on fedjax. Run in its own environment:
field_fedjax.py PROBLEM.npz COHORT ROUNDS CORES DEVICE."""

import json
import os
import sys
import time

cores = int(sys.argv[4])
if cores == 1 and sys.argv[5] == "cpu":
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax  # noqa: E402
import numpy as np  # noqa: E402

for name in ("tree_map", "tree_leaves", "tree_structure", "tree_unflatten"):  # fedjax 0.0.17 uses names jax has moved
    if not hasattr(jax, name):
        setattr(jax, name, getattr(jax.tree_util, name))

import fedjax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

path, cohort, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = np.load(path)
x, y = np.ascontiguousarray(data["x"].transpose(0, 2, 3, 1)), data["y"].astype(np.int32)
parts, classes = data["parts"], int(y.max()) + 1
channels, side = x.shape[3], x.shape[1]
rng = np.random.default_rng(0)


def weights(*shape):
    return jnp.asarray(rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[:-1])), dtype=jnp.float32)


flat = 64 * ((side - 4) // 2) ** 2
params = [(weights(*s), jnp.zeros(s[-1])) for s in ((3, 3, channels, 32), (3, 3, 32, 64), (flat, 128), (128, classes))]


def convolved(h, layer):
    out = jax.lax.conv_general_dilated(h, layer[0], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(out + layer[1])


def dropped(h, rate, key):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, h.shape), h / (1 - rate), 0.0)


def loss(params, batch, key):
    one, two = jax.random.split(key)
    h = convolved(convolved(batch["x"], params[0]), params[1])
    h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = dropped(h, 0.25, one).reshape(h.shape[0], -1)
    h = dropped(jax.nn.relu(h @ params[2][0] + params[2][1]), 0.5, two)
    log_p = jax.nn.log_softmax(h @ params[3][0] + params[3][1])
    return -jnp.take_along_axis(log_p, batch["y"][:, None], 1).mean()


algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    lambda params, batch, key: jax.grad(loss)(params, batch, key),
    fedjax.optimizers.sgd(float(data["lr"])),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=10, num_epochs=1, drop_remainder=False),
)
state, seconds = algorithm.init(params), []
for t in range(rounds):
    chosen = rng.choice(len(parts), cohort, replace=False)
    keys = jax.random.split(jax.random.PRNGKey(t), cohort)
    began = time.perf_counter()
    sets = [fedjax.ClientDataset({"x": x[parts[k]], "y": y[parts[k]]}) for k in chosen]
    state, _ = algorithm.apply(state, [(str(k), s, keys[i]) for i, (k, s) in enumerate(zip(chosen, sets, strict=True))])
    jax.block_until_ready(state.params)
    seconds.append(time.perf_counter() - began)
print("RESULT " + json.dumps(seconds), flush=True)
