"""Every metric from one confusion matrix."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedtail.errors import FedtailError, one_of

MANY, FEW = 100, 20
"""Many-shot: at least 100 training samples; few-shot: at most 20; medium between."""

HEADLINE = ("accuracy", "balanced_accuracy", "macro_f1", "weighted_f1", "micro_f1")
DEFECT = ("defect_score", "defect_recall", "background_precision", "false_alarm_rate")
"""Reported too where the data declare a background class."""
SCORES = ("accuracy", "balanced_accuracy", "macro_f1", "defect_score")
"""What rate searches and model selection may compare by: what ``score`` knows."""


def no_background(setting: str) -> FedtailError:
    """The error where a defect score is asked of data without a background class."""
    others = ", ".join(name for name in SCORES if name != "defect_score")
    return FedtailError(
        f'{setting} needs data with a class that means "nothing found" (data.background of an image folder); others: '
        f"{others}"
    )


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, n_classes: int) -> np.ndarray:
    """(C, C) counts; row = true class, column = predicted class."""
    y, z = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    return np.bincount(y * n_classes + z, minlength=n_classes * n_classes).reshape(n_classes, n_classes)


def per_class(confusion: ArrayLike) -> dict[str, np.ndarray]:
    """Recall (= per-class accuracy, NaN for classes without test samples), precision, F1 and support."""
    m = np.asarray(confusion, dtype=np.float64)
    hit, support, predicted = np.diag(m), m.sum(1), m.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.where(support > 0, hit / support, np.nan)
        precision = np.where(predicted > 0, hit / predicted, 0.0)
        f1 = np.where(support + predicted > 0, 2 * hit / (support + predicted), 0.0)
    return {"recall": recall, "precision": precision, "f1": f1, "support": support}


def shot_groups(train_counts: ArrayLike) -> dict[str, np.ndarray]:
    """Boolean masks of many / medium / few classes by *training* counts."""
    n = np.asarray(train_counts)
    return {"many": n >= MANY, "medium": (n > FEW) & (n < MANY), "few": n <= FEW}


def defect_score(confusion: ArrayLike, background: int, weight: float = 0.5) -> dict[str, float]:
    """How well defects are found, as one number: ``weight * defect_recall + (1 - weight) * background_precision``.

    The paper reports "the company's weighted accuracy that balances defect recall and non-defect precision" without
    a formula; this is ours. With b the background class ("no defect"):

    - ``defect_recall``: share of true defects that are called a defect, of whatever kind;
    - ``background_precision``: share of the samples called b that are b, that is, of passed chips that are good;
    - ``false_alarm_rate``: share of true b called a defect. The score itself hardly sees false alarms (with few
      defects the precision is near 1 for any model), so never read it without this one beside it.

    Undefined shares (no defects, nothing passed) count as 0 in the score and are NaN by themselves.
    """
    shares = _defect_shares(class_counts(np.asarray(confusion)), background, weight)
    return {name: float(value) for name, value in zip(DEFECT, shares, strict=True)}


def _defect_shares(counts: ArrayLike, background: int, weight: float = 0.5) -> tuple[np.ndarray, ...]:
    """``DEFECT`` from (..., 3, C) counts of correct, true and predicted samples per class."""
    c = np.asarray(counts, dtype=np.float64)
    kept, good, passed = (c[..., i, background] for i in range(3))
    defects = c[..., 1, :].sum(-1) - good
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.where(defects > 0, 1 - (passed - kept) / defects, np.nan)
        precision = np.where(passed > 0, kept / passed, np.nan)
        alarm = np.where(good > 0, 1 - kept / good, np.nan)
    total = weight * np.nan_to_num(recall) + (1 - weight) * np.nan_to_num(precision)
    return total, recall, precision, alarm


def summarize(
    confusion: ArrayLike, train_counts: ArrayLike | None = None, background: int | None = None
) -> dict[str, Any]:
    """Headline metrics, per-class accuracy and, given training counts, head / tail and shot groups.

    Data with a ``background`` class ("no defect") also get ``defect_score`` and its parts.

    Averages over classes take the classes that have test samples. An empty group is NaN, not 0.
    ``head`` and ``tail`` are the accuracy over the most and least frequent third of the classes (at least
    one class each), since small data sets have no few-shot classes at all.

    Where class counts stay at the sites of a real federation, ``confusion`` is (1, 2): correctly classified and
    all samples. Accuracy is then the only number that is not NaN.
    """
    m = np.asarray(confusion, dtype=np.float64)
    if m.shape == (1, 2):
        return _totals(float(m[0, 0]), float(m[0, 1]))
    each = per_class(m)
    total, support, seen = m.sum(), each["support"], each["support"] > 0
    share = support / total if total else support
    recall, f1 = each["recall"], each["f1"]
    accuracy = float(np.diag(m).sum() / total) if total else float("nan")
    out: dict[str, Any] = {
        "accuracy": accuracy,
        "balanced_accuracy": _mean(recall[seen]),
        "macro_f1": _mean(f1[seen]),
        "weighted_f1": float((share * f1).sum()) if total else float("nan"),
        "micro_f1": accuracy,
        "per_class_accuracy": [float(v) for v in recall],
        "per_class_f1": [float(v) for v in f1],
    }
    if background is not None:
        out |= defect_score(m, background)
    if train_counts is not None:
        n = np.asarray(train_counts)
        for name, mask in shot_groups(n).items():
            out[name] = _mean(recall[mask & seen])
        order = np.lexsort((np.arange(n.size), -n))
        third = max(1, n.size // 3)
        out["head"] = _mean(recall[order[:third]][seen[order[:third]]])
        out["tail"] = _mean(recall[order[-third:]][seen[order[-third:]]])
    return out


def _totals(correct: float, total: float) -> dict[str, Any]:
    accuracy = correct / total if total else float("nan")
    return {**dict.fromkeys(HEADLINE, float("nan")), "accuracy": accuracy, "micro_f1": accuracy}


def majority_floor(
    test_counts: ArrayLike, majority: int | None = None, background: int | None = None
) -> dict[str, float]:
    """Headline metrics of always answering the majority class: the floor every table shows.

    ``majority`` is the most frequent training class; by default the most frequent test class.
    """
    n = np.asarray(test_counts, dtype=np.int64)
    column = int(n.argmax()) if majority is None else majority
    m = np.zeros((n.size, n.size), dtype=np.int64)
    m[:, column] = n
    summary = summarize(m, background=background)
    return {name: summary[name] for name in (*HEADLINE, *DEFECT) if name in summary}


def score(counts: ArrayLike, metric: str, background: int | None = None) -> np.ndarray:
    """A validation metric from per-class counts, for one model or many.

    Args:
        counts: (..., 3, C) correctly classified, true and predicted samples per class: what clients
            return instead of a confusion matrix. Sums over clients are exact.
        metric: one of ``SCORES``.
        background: the class that means "nothing found"; ``defect_score`` needs it.
    """
    c = np.asarray(counts, dtype=np.float64)
    hit, support, predicted = c[..., 0, :], c[..., 1, :], c[..., 2, :]
    seen = support > 0
    n_seen = np.maximum(seen.sum(-1), 1)
    if metric == "accuracy":
        return hit.sum(-1) / np.maximum(support.sum(-1), 1)
    if metric == "balanced_accuracy":
        return np.where(seen, hit / np.maximum(support, 1), 0.0).sum(-1) / n_seen
    if metric == "macro_f1":
        return np.where(seen, 2 * hit / np.maximum(support + predicted, 1), 0.0).sum(-1) / n_seen
    if metric == "defect_score":
        if background is None:
            raise no_background("run.metric = 'defect_score'")
        return _defect_shares(c, background)[0]
    raise one_of("metric", metric, SCORES)


def class_counts(confusion: np.ndarray) -> np.ndarray:
    """(..., 3, C) correct, true and predicted samples per class from matrices (..., C, C): all that ``score`` needs."""
    return np.stack([np.diagonal(confusion, axis1=-2, axis2=-1), confusion.sum(-1), confusion.sum(-2)], axis=-2)


def alignment(updates: ArrayLike, weights: ArrayLike) -> float:
    """mean_k cos(u_k, sum_j p_j u_j): 1 for identical updates, 1/sqrt(K) for K orthogonal equal-norm ones."""
    u = np.asarray(updates, dtype=np.float64)
    return gram_alignment(u @ u.T, weights)


def gram_alignment(gram: ArrayLike, weights: ArrayLike) -> float:
    """The same from the (K, K) inner products of the updates, which a GPU can compute where the updates are."""
    g, p = np.asarray(gram, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    norms = np.sqrt(np.diag(g)) * np.sqrt(max(float(p @ g @ p), 0.0))
    return _mean((g @ p)[norms > 0] / norms[norms > 0])


def path_variation(rates: ArrayLike, weights: ArrayLike) -> np.ndarray:
    """(T,) V_t = sum over rounds up to t of sum_k p_k |r_k^t - r_k^(t-1)|, with r^(-1) := r^0; rates (T, K)."""
    r, p = np.asarray(rates, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    steps = [0.0, *(float(np.abs(now - last) @ p) for last, now in itertools.pairwise(r))]  # no second (T, K) array
    return np.cumsum(steps[: len(r)])


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
