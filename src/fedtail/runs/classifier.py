"""``FederatedClassifier``: a federation as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    assert_all_finite,
    check_consistent_length,
    check_is_fitted,
    check_random_state,
    column_or_1d,
    validate_data,
)

from fedtail.data.federation import Federation
from fedtail.data.tables.labels import label_type
from fedtail.errors import FedtailError
from fedtail.methods import Method
from fedtail.runs.execution import fit


class FederatedClassifier(ClassifierMixin, BaseEstimator):
    """Classifies rows of a table; trained across sites, each row at the site that it belongs to.

    ``fit(X, y, sites=s)`` names the site of every row; or ``site="hospital"`` names the column of ``X`` that does,
    which needs no further argument in ``cross_val_score`` and pipelines. Without either, all rows are one site's.

    >>> X, y = np.random.default_rng(0).normal(size=(200, 3)), np.repeat([0, 1], [180, 20])
    >>> FederatedClassifier(rounds=2).fit(X, y, sites=np.arange(200) % 2).predict(X[:1]).dtype
    dtype('int64')

    Args:
        method: a ``Method`` or its name, as for ``fedtail.fit``.
        model: the name of a model; ``auto`` suits the data.
        rates: resampling rates, as for ``fedtail.fit``.
        rounds: rounds of training; fewer where validation stops improving.
        lr: the learning rate; ``auto`` finds it in the first rounds.
        site: the column of ``X`` that holds each row's site; only trees have it as an input.
        validation: share of each site's rows that is kept for choosing the learning rate, the round and the decision.
        settings: further settings by the keywords of ``fedtail.fit``.
        random_state: the seed; None is 0.

    Attributes:
        result_: the ``Result`` of the run. ``classes_``, ``n_features_in_``, ``feature_names_in_``: as in scikit-learn.
    """

    def __init__(
        self,
        method: Method | str = "fedcgnm",
        model: str = "auto",
        rates: str | float | Sequence[float] = 0.6,
        rounds: int = 50,
        lr: float | str = "auto",
        site: str | None = None,
        validation: float = 0.1,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        self.method, self.model, self.rates, self.rounds, self.lr = method, model, rates, rounds, lr
        self.site, self.validation, self.settings, self.random_state = site, validation, settings, random_state

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        """Train on rows (N, ...) with labels (N,), each at its site."""
        if y is None:
            raise ValueError("FederatedClassifier requires y to be passed, but the target y is None")
        rows = self._rows(X, reset=True)
        y = column_or_1d(y, warn=True)
        check_consistent_length(rows, y)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has only one class, {self.classes_[0]!r}; training needs at least two classes")
        if self.site is not None:
            if sites is not None:
                raise ValueError(f"sites are given, and also named by the column {self.site!r}; use one of them")
            sites = self.site
        seed = 0 if self.random_state is None else int(check_random_state(self.random_state).randint(2**31))
        try:
            options = {"test_fraction": 0.0, "validation": self.validation, "seed": seed}
            numbered = Federation.from_rows(rows, codes, sites, **options)  # labels may be any text
            names = tuple(str(label) for label in self.classes_)
            federation = replace(numbered, classes=names, label_type=label_type(self.classes_))
            lr = {} if self.lr == "auto" else {"lr": self.lr}  # tables have auto anyway, and trees refuse it
            chosen: dict[str, Any] = {"rounds": self.rounds, "seed": seed, **lr, **(self.settings or {})}
            self.result_ = fit(federation, self.model, self.method, self.rates, **chosen)
        except FedtailError as error:
            raise ValueError(str(error)) from error
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """(N, C) class probabilities, in the order of ``classes_``."""
        check_is_fitted(self)
        rows = self._rows(X)
        try:
            return self.result_.predict_proba(rows).astype(np.float64)
        except FedtailError as error:
            raise ValueError(str(error)) from error

    def predict(self, X: Any) -> np.ndarray:
        """(N,) labels, by the decision that was fitted with the model."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[self.result_.decision.answers(probabilities)])

    def _rows(self, X: Any, *, reset: bool = False) -> Any:
        """A DataFrame as it is; anything else as an array of numbers."""
        if not isinstance(X, pd.DataFrame):
            if self.site is not None:
                raise ValueError(f"site = {self.site!r} names a column, so X must be a DataFrame")
            return validate_data(self, X, reset=reset, ensure_all_finite="allow-nan")
        validate_data(self, X, reset=reset, skip_check_array=True)
        if not len(X):
            raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
        if self.site is not None and self.site not in X:
            raise ValueError(f"X has no column {self.site!r}, which site names; columns: {', '.join(map(str, X))}")
        return X

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags
