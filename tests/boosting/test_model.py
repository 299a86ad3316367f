"""A forest as a vector, a module and an ONNX graph is the same forest."""

import numpy as np
import pytest
import torch

from fedtail.boosting.model import Shape, TreesModel
from fedtail.boosting.onnx import forest_graph
from tests.boosting.growing import COLUMNS, a_plan, grown, same, table


def made(n_classes: int, rounds: int = 5) -> tuple[TreesModel, np.ndarray, np.ndarray]:
    x, y = table(0, 500, n_classes)
    forest, _ = grown(x, y, [np.arange(400)], a_plan(n_classes=n_classes, rounds=3), np.arange(400, 500))
    shape = Shape(COLUMNS, n_classes, rounds, 8)
    model = TreesModel(shape)
    model.load(shape.pack(forest))
    return model, x, forest.logits(forest.scores(forest.start.bins.of(model.module.values(torch.from_numpy(x)))))


@pytest.mark.parametrize("n_classes", [2, 3])
def test_a_vector_holds_all_of_a_forest_that_may_grow_on(n_classes: int) -> None:
    model, _, _ = made(n_classes)
    forest = model.shape.unpack(model.vector)
    assert forest is not None and forest.rounds == 3 and len(forest.checks) == 3
    assert torch.equal(model.shape.pack(forest), model.vector)
    again = Shape.from_json(model.shape.to_json()).unpack(model.vector)
    assert again is not None and same(forest, again)
    assert np.array_equal(forest.start.scores, again.start.scores) and forest.start.fields == again.start.fields


def test_an_empty_vector_is_no_forest() -> None:
    shape = Shape(COLUMNS, 3, 2, 8)
    assert shape.unpack(TreesModel(shape).vector) is None


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_module_gives_the_logits_of_the_forest(n_classes: int) -> None:
    model, x, logits = made(n_classes)
    assert np.array_equal(model.module(torch.from_numpy(x)).numpy(), logits)
    state, fresh = model.module.state_dict(), TreesModel(model.shape).module
    fresh.load_state_dict(state)
    assert np.array_equal(fresh(torch.from_numpy(x)).numpy(), logits)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_graph_gives_the_logits_of_the_forest(n_classes: int) -> None:
    ort = pytest.importorskip("onnxruntime")
    model, x, logits = made(n_classes)
    session = ort.InferenceSession(forest_graph(model.module).SerializeToString())
    assert np.allclose(session.run(None, {"x": x})[0], logits, atol=1e-5)


def test_the_graph_too_takes_a_level_without_a_bin_for_missing() -> None:
    ort = pytest.importorskip("onnxruntime")
    x, y = table(0, 500, 3)
    rare = np.flatnonzero(x[:, 6])[5:]  # of the last level, five rows are left
    x[rare, 6], x[rare, 7] = 0, 1
    forest, _ = grown(x, y, [np.arange(500)], a_plan(rounds=5))
    model = TreesModel(Shape(COLUMNS, 3, 5, 8))
    model.load(model.shape.pack(forest))
    assert forest.start.bins.kept[2] == (0, 1, 2, 3)
    x[:, 2:8] = np.eye(6)[4]
    session = ort.InferenceSession(forest_graph(model.module).SerializeToString())
    assert np.allclose(session.run(None, {"x": x})[0], model.module(torch.from_numpy(x)).numpy(), atol=1e-5)
