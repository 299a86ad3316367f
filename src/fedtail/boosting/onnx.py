"""A forest as ONNX: stored samples -> logits, with a TreeEnsemble in the middle."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from fedtail.boosting.model import TreesModule
from fedtail.boosting.predictor import Forest

OPSET, ML_OPSET = 18, 5
LEQ, MEMBER = 0, 6
"""Modes of a node: at most a number; one of several."""


def forest_graph(module: TreesModule) -> Any:
    """An ONNX model from ``x``, (batch, width) float32 stored samples with the number of the site behind them where the
    forest asks for it (-1 for none), to ``logits``, (batch, C) float32."""
    from onnx import TensorProto, helper, numpy_helper

    forest, columns = module.read(), module.shape.columns
    width = 1 + max(max(c.at + max(c.levels if not c.code else 1, 1) - 1, c.missing) for c in columns)
    nodes: list[Any] = []
    held: list[Any] = []

    def constant(name: str, value: Any, kind: Any) -> str:
        held.append(numpy_helper.from_array(np.asarray(value, dtype=kind), name))
        return name

    def add(op: str, inputs: list[str], output: str, **more: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], **more))
        return output

    nan, half = (constant(name, value, np.float32) for name, value in (("nan", np.nan), ("half", 0.5)))
    last = constant("last", -1, np.int64)
    parts = []
    for i, (column, kept) in enumerate(zip(columns, forest.start.bins.kept, strict=True)):
        end = column.at + (column.levels if column.levels and not column.code else 1)
        at = constant(f"at{i}", np.arange(column.at, end), np.int64)
        value = add("Gather", ["x", at], f"given{i}", axis=1)
        if column.levels:
            if column.code:
                place = add("Cast", [value], f"place{i}", to=TensorProto.INT64)
            else:
                top = add("ReduceMax", [value, constant(f"axes{i}", [1], np.int64)], f"top{i}", keepdims=1)
                first = add("ArgMax", [value], f"first{i}", axis=1)
                place = add("Where", [add("Less", [top, half], f"no{i}"), last, first], f"place{i}")
            known = np.full(column.levels + 1, np.nan)  # as in Bins.of, a level without a bin of its own is missing
            known[list(kept)] = kept
            value = add("Gather", [constant(f"levels{i}", known, np.float32), place], f"known{i}")
        if column.missing >= 0:
            flag = add("Gather", ["x", constant(f"flag{i}", [column.missing], np.int64)], f"gone{i}", axis=1)
            value = add("Where", [add("Greater", [flag, half], f"is{i}"), nan, value], f"value{i}")
        parts.append(value)
    values = add("Cast", [add("Concat", parts, "columns", axis=1)], "values", to=TensorProto.DOUBLE)
    add("TreeEnsemble", [values], "grown", domain="ai.onnx.ml", **_ensemble(forest))
    scores = add("Add", ["grown", constant("start", forest.start.scores[None], np.float64)], "scores")
    if forest.column.shape[1] == 1:
        scores = add("Concat", [add("Sub", [scores, scores], "first"), scores], "both", axis=1)
    exact = add("Add", [scores, constant("correction", forest.start.correction[None], np.float64)], "exact")
    add("Cast", [exact], "logits", to=TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        "forest",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", len(forest.start.counts)])],
        [tensor for tensor in held if any(tensor.name in node.input for node in nodes)],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _ensemble(forest: Forest) -> dict[str, Any]:
    """The attributes of a TreeEnsemble that adds the values of leaves per tree of a round."""
    from onnx import numpy_helper

    bins, rounds, trees = forest.start.bins, forest.rounds, forest.column.shape[1]
    left = forest.goes_left
    told = defaultdict[str, list[Any]](list)
    target: list[int] = []
    weight: list[float] = []
    members: list[float] = []
    roots = []
    for t in range(rounds):
        for k in range(trees):
            column, child = forest.column[t, k], forest.child[t, k]
            inner = [0, *(int(i) for i in np.flatnonzero(column >= 0) if i)]
            place = {node: len(told["nodes_featureids"]) + i for i, node in enumerate(inner)}
            roots.append(place[0])
            for node in inner:
                f = int(column[node])
                alone = f < 0  # a tree that is a leaf: both ways lead to it
                goes = left[t, k, node]
                size = 2 if alone else int(bins.sizes[f])
                split, mode = np.inf, LEQ
                if not alone and bins.columns[f].levels:
                    chosen = [float(bins.kept[f][b]) for b in np.flatnonzero(goes[: size - 1])]
                    mode, split = (MEMBER, 0.0) if chosen else (LEQ, -1.0)
                    members += [*chosen, np.nan] if chosen else []
                elif not alone:
                    last = int(goes[: size - 1].sum()) - 1
                    split = float(np.float32(bins.cuts[f][last])) if last < len(bins.cuts[f]) else np.inf
                told["nodes_featureids"].append(max(f, 0))
                told["nodes_modes"].append(mode)
                told["nodes_splits"].append(split)
                told["nodes_missing_value_tracks_true"].append(int(goes[size - 1]))
                for side, step in (("true", 0), ("false", 1)):
                    below = node if alone else int(child[node]) + step
                    leaf = alone or column[below] < 0
                    told[f"nodes_{side}leafs"].append(int(leaf))
                    told[f"nodes_{side}nodeids"].append(len(target) if leaf else place[below])
                    if leaf:
                        target.append(k)
                        weight.append(float(forest.value[t, k, below]))
    return {
        **told,
        "aggregate_function": 1,
        "post_transform": 0,
        "n_targets": trees,
        "tree_roots": roots,
        "nodes_modes": numpy_helper.from_array(np.array(told["nodes_modes"], dtype=np.uint8)),
        "nodes_splits": numpy_helper.from_array(np.array(told["nodes_splits"], dtype=np.float64)),
        "leaf_targetids": target,
        "leaf_weights": numpy_helper.from_array(np.array(weight)),
        **({"membership_values": numpy_helper.from_array(np.array(members))} if members else {}),
    }
