"""Metrics, each declared once: function, title, direction and what it needs.

Everything that ranks, prints, draws or searches by a metric reads this table. Counts of correct, true and predicted
samples per class are what metrics are made of: sites can add them up, and sums over sites are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedtail.core.evidence import Evidence, evidence_of, rarest_class, ratio, shot_groups, third
from fedtail.core.scores import (
    Scores,
    average_precision,
    balanced_loss,
    brier_score,
    calibration_error,
    log_loss,
    roc_auc,
)
from fedtail.errors import FedtailError
from fedtail.registry import Registry


@dataclass(frozen=True)
class Metric:
    """One number that says how good a model is."""

    name: str
    title: str
    """The head of a column, such as "Macro F1"."""
    function: Callable[[Evidence], np.ndarray]
    """Evidence -> (...) values; NaN where undefined."""
    words: str = ""
    """Its name in a sentence; by default the title."""
    higher_is_better: bool = True
    needs: str | None = None
    """What must be known beyond counts: ``background``, ``train_counts``, ``scores`` or ``sites``."""
    totals: bool = False
    """Whether it can be told from totals, where a site reveals no counts per class."""
    headline: bool = True
    """Whether tables show it, where the runs have it."""
    priority: int = 10
    """Where there is no room for all, those of lower priority are left out first."""
    smooth: tuple[str, ...] = ()
    """Metrics of probabilities that go with it and that fewer samples tell: what races compare models by."""

    def __call__(self, evidence: Evidence) -> np.ndarray:
        return np.asarray(self.function(evidence))

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", self.words or self.title[:1].lower() + self.title[1:])


def _own_metric(name: str, given: Any) -> Metric:
    if isinstance(given, Metric):
        return replace(given, name=name)
    if not callable(given):
        raise FedtailError(f"metric {name!r} is a {type(given).__name__}, not a Metric or a function of Evidence")
    return Metric(name=name, title=given.__name__.replace("_", " ").capitalize(), function=given)


METRICS: Registry[Metric] = Registry("metric", "run", group="metrics", adapt=_own_metric)


def _recall(e: Evidence, over: np.ndarray | bool = True) -> np.ndarray:
    """The mean recall over some of the classes with samples."""
    return _class_mean(e.recall, e.seen & over)


def _shot_recall(kind: str, e: Evidence) -> np.ndarray:
    return _recall(e, shot_groups(np.asarray(e.train_counts))[kind])


def _over_classes(e: Evidence, area: Callable[[np.ndarray], float]) -> np.ndarray:
    """The mean of an area over the classes that have one."""
    each = np.array([area(bins) for bins in e.scores.bins]) if e.scores is not None else np.empty(0)
    return np.asarray(_mean(each[np.isfinite(each)]))


def _over_sites(e: Evidence, fold: Callable[[np.ndarray], Any]) -> np.ndarray:
    known = np.empty(0) if e.sites is None else e.sites[np.isfinite(e.sites)]
    return np.asarray(fold(known) if known.size else np.nan)


WORDS = {
    "balanced_accuracy": "balanced accuracy",
    "many": "accuracy of many-shot classes",
    "medium": "accuracy of medium-shot classes",
    "few": "accuracy of few-shot classes",
    "head": "accuracy of the most frequent third",
    "tail": "accuracy of the rarest third",
    "pr_auc": "mean area under the precision-recall curves",
    "rare_pr_auc": "area under the precision-recall curve of the rarest class",
    "roc_auc": "mean area under the ROC curves",
    "balanced_loss": "class-balanced log loss",
    "calibration_error": "expected calibration error",
    "worst_site": "macro F1 of the worst site",
    "site_spread": "standard deviation of macro F1 over sites",
    "false_alarm_rate": "false alarm rate",
}
"""What a metric is called in a sentence, where that is not its title."""


def _declare(name: str, title: str, function: Callable[[Any], Any], **more: Any) -> None:
    METRICS.add(name)(Metric(name=name, title=title, function=function, words=WORDS.get(name, ""), **more))


def _accuracy(e: Evidence) -> np.ndarray:
    return ratio(e.hit.sum(-1), e.support.sum(-1), np.nan)


def _rare_pr_auc(e: Evidence) -> np.ndarray:
    return np.asarray(np.nan if e.scores is None else average_precision(e.scores.bins[rarest_class(e)]))


HIDDEN: dict[str, Any] = {"headline": False}
LOW: dict[str, Any] = {"higher_is_better": False}
SURE, BALANCED = ("log_loss",), ("balanced_loss", "pr_auc")

_declare("accuracy", "Accuracy", _accuracy, totals=True, priority=4, smooth=SURE)
_declare("balanced_accuracy", "Balanced acc.", _recall, priority=1, smooth=BALANCED)
_declare("macro_f1", "Macro F1", lambda e: _class_mean(e.f1, e.seen), smooth=BALANCED)
_declare("weighted_f1", "Weighted F1", lambda e: _weighted_f1(e), priority=2, smooth=SURE)
_declare("micro_f1", "Micro F1", _accuracy, totals=True, **HIDDEN, smooth=SURE)
for shot in ("many", "medium", "few"):
    _declare(shot, f"{shot.capitalize()}-shot", partial(_shot_recall, shot), needs="train_counts", **HIDDEN)
_declare("head", "Head", lambda e: _recall(e, third(e, "head")), needs="train_counts", priority=3)
_declare("tail", "Tail", lambda e: _recall(e, third(e, "tail")), needs="train_counts", priority=9)
_declare("pr_auc", "PR-AUC", lambda e: _over_classes(e, average_precision), needs="scores", priority=6)
_declare("rare_pr_auc", "PR-AUC, rarest", _rare_pr_auc, needs="scores", priority=7)
_declare("roc_auc", "ROC-AUC", lambda e: _over_classes(e, roc_auc), needs="scores", **HIDDEN)
_declare("log_loss", "Log loss", lambda e: log_loss(e.scores), needs="scores", **LOW, **HIDDEN)
_declare("balanced_loss", "Balanced loss", lambda e: balanced_loss(e.scores), needs="scores", **LOW, **HIDDEN)
_declare("brier", "Brier score", lambda e: brier_score(e.scores), needs="scores", **LOW, **HIDDEN)
_declare(
    "calibration_error", "Cal. error", lambda e: calibration_error(e.scores.cells), needs="scores", **LOW, priority=5
)
_declare("worst_site", "Worst site", lambda e: _over_sites(e, np.min), needs="sites", priority=8)
_declare("site_spread", "Site spread", lambda e: _over_sites(e, np.std), needs="sites", **LOW, priority=0)
_declare("defect_score", "Defect score", lambda e: _defect(e)[0], needs="background")
_declare("defect_recall", "Defect recall", lambda e: _defect(e)[1], needs="background", **HIDDEN)
_declare("background_precision", "Background prec.", lambda e: _defect(e)[2], needs="background", **HIDDEN)
_declare("false_alarm_rate", "False alarms", lambda e: _defect(e)[3], needs="background", **LOW)


def metrics() -> list[Metric]:
    """Every metric, the user's own that this process uses included."""
    return [METRICS[name] for name in METRICS.named()]


def shown(values: Mapping[str, Any], most: int = 99) -> list[Metric]:
    """Return the metrics that tables show of a result, at most so many; of two classes the PR-AUC of the rare one
    says what the mean of both would hide."""
    two = len(values.get("per_class_accuracy") or ()) == 2
    known = [m for m in metrics() if m.headline and np.isfinite(number_of(values.get(m.name)))]
    known = [m for m in known if not (two and m.name == "pr_auc")]
    kept = sorted(known, key=lambda m: -m.priority)[:most]
    return [m for m in known if m in kept]


def number_of(value: Any) -> float:
    """A value of a record; NaN where it has none."""
    return float(value) if isinstance(value, int | float) else float("nan")


def summarize(
    confusion: ArrayLike,
    train_counts: ArrayLike | None = None,
    background: int | None = None,
    scores: Scores | None = None,
    sites: ArrayLike | None = None,
) -> dict[str, Any]:
    """Every metric that the matrix, the training counts and the background class suffice for, and accuracy and F1 per
    class.

    Averages over classes take the classes that have test samples. An empty group is NaN, not 0.
    ``head`` and ``tail`` are the accuracy over the most and least frequent third of the classes (at least
    one class each), since small data sets have no few-shot classes at all.

    Where class counts stay at the sites of a real federation, ``confusion`` is (1, 2): correctly classified and
    all samples. What cannot be told from these is NaN.
    """
    m = np.asarray(confusion, dtype=np.float64)
    if m.shape == (1, 2):
        totals = Evidence(np.array([[m[0, 0]], [m[0, 1]], [m[0, 1]]]))
        return {x.name: float(x(totals)) if x.totals else float("nan") for x in metrics() if x.needs is None}
    evidence = evidence_of(m, train_counts, background, scores, sites)
    out: dict[str, Any] = {x.name: float(x(evidence)) for x in metrics() if known(x, evidence)}
    out |= {"per_class_accuracy": [float(v) for v in evidence.recall], "per_class_f1": [float(v) for v in evidence.f1]}
    if scores is not None:
        out |= {
            "per_class_precision": [float(v) for v in evidence.precision],
            "per_class_support": [int(v) for v in evidence.support],
            "per_class_pr_auc": [average_precision(bins) for bins in scores.bins],
            "per_class_roc_auc": [roc_auc(bins) for bins in scores.bins],
        }
    return out


def known(metric: Metric, evidence: Evidence) -> bool:
    """Whether the evidence suffices for a metric."""
    return metric.needs is None or getattr(evidence, metric.needs) is not None


def majority_floor(
    test_counts: ArrayLike, majority: int | None = None, background: int | None = None
) -> dict[str, float]:
    """Metrics of always answering the majority class: the floor every table shows.

    ``majority`` is the most frequent training class; by default the most frequent test class.
    """
    n = np.asarray(test_counts, dtype=np.int64)
    column = int(n.argmax()) if majority is None else majority
    m = np.zeros((n.size, n.size), dtype=np.int64)
    m[:, column] = n
    return {name: value for name, value in summarize(m, background=background).items() if name in METRICS}


def score(counts: ArrayLike, metric: str, background: int | None = None) -> np.ndarray:
    """Return the metric that candidates are compared by, of one model or many; higher is better.

    counts: (..., 3, C) correctly classified, true and predicted samples per class, which clients return instead of a
    confusion matrix. background: the class that means "nothing found".
    """
    chosen, evidence = METRICS[metric], Evidence(np.asarray(counts, dtype=np.float64), background)
    check_known(chosen, evidence)
    return reward(chosen, chosen(evidence))


def score_of(scores: Scores, metric: str, background: int | None = None) -> float:
    """Return the metric of one model from counts of its probabilities: any but those of training counts or sites."""
    chosen, evidence = METRICS[metric], evidence_of(scores.confusion, background=background, scores=scores)
    check_known(chosen, evidence)
    return float(reward(chosen, chosen(evidence)))


def reward(metric: Metric, values: np.ndarray) -> np.ndarray:
    """Values such that higher is better and a search, which wants rewards of 0 to 1, can take them: a metric that
    should be low is turned into 1 / (1 + value). Undefined is the worst."""
    return np.nan_to_num(values if metric.higher_is_better else 1 / (1 + np.asarray(values)))


def signed(metric: str, value: float | None) -> float:
    """A value of which more is better, whatever the metric; minus infinity where it is undefined."""
    if value is None or not np.isfinite(value):
        return -np.inf
    return float(value) if METRICS[metric].higher_is_better else -float(value)


def check_known(metric: Metric, evidence: Evidence) -> None:
    """Raise unless models can be compared by a metric with what is known."""
    if not known(metric, evidence):
        raise lacking(metric, f"run.metric = {metric.name!r}")


def lacking(metric: Metric, setting: str) -> FedtailError:
    """The error where ``setting`` asks for a metric that needs more than is known."""
    others = ", ".join(m.name for m in metrics() if m.headline and m.needs is None)
    lacks = {
        "background": 'data with a class that means "nothing found" (data.background of an image folder)',
        "train_counts": "class counts of the training data, which a search does not see",
        "scores": "probability counts, which nobody tells",
        "sites": "per-site results, which a search cannot use to compare candidates (run.select can)",
    }[str(metric.needs)]
    return FedtailError(f"{setting} needs {lacks}; use one of: {others}")


def _class_mean(values: np.ndarray, over: np.ndarray) -> np.ndarray:
    """(...) mean of (..., C) values over some of the classes; NaN over none."""
    if values.ndim == 1:
        return np.asarray(_mean(values[over]))
    return ratio(np.where(over, values, 0.0).sum(-1), over.sum(-1), np.nan)


def _weighted_f1(e: Evidence) -> np.ndarray:
    total = e.support.sum(-1, keepdims=True)
    return np.where(total[..., 0] > 0, (ratio(e.support, total, 0.0) * e.f1).sum(-1), np.nan)


def _defect(e: Evidence) -> tuple[np.ndarray, ...]:
    """How well defects are found, as one number: half ``defect_recall``, half ``background_precision``; and these.

    The paper reports "the company's weighted accuracy that balances defect recall and non-defect precision" without
    a formula; this is ours. With b the background class ("no defect"):

    - ``defect_recall``: share of true defects that are called a defect, of whatever kind;
    - ``background_precision``: share of the samples called b that are b, that is, of passed chips that are good;
    - ``false_alarm_rate``: share of true b called a defect. The score itself hardly sees false alarms (with few
      defects the precision is near 1 for any model), so never read it without this one beside it.

    Undefined shares (no defects, nothing passed) count as 0 in the score and are NaN by themselves.
    """
    b = int(e.background or 0)
    kept, good, passed = e.hit[..., b], e.support[..., b], e.predicted[..., b]
    defects = e.support.sum(-1) - good
    recall = 1 - ratio(passed - kept, defects, np.nan)
    precision = ratio(kept, passed, np.nan)
    alarm = 1 - ratio(kept, good, np.nan)
    return 0.5 * np.nan_to_num(recall) + 0.5 * np.nan_to_num(precision), recall, precision, alarm


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
