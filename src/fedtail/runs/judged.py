"""Rows to judge a trained model by: probabilities, and labels and sites where the data has them.

The model may be a run folder's, an ONNX file that ``fedtail export`` wrote, or anything with ``predict_proba``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedtail.core.decisions import Decision
from fedtail.core.scores import Scores
from fedtail.core.totals import total
from fedtail.data.inputs import image_files, prepare_inputs, read_for
from fedtail.data.tables.labels import class_places, name_codes, need_column
from fedtail.data.tables.read import Table, from_frame, is_table, read_table
from fedtail.errors import FedtailError, first_line
from fedtail.registry import in_user_code, load_object
from fedtail.runs.saved import SavedModel, load_model, site_numbers
from fedtail.words import listing, plural


@dataclass(frozen=True)
class Judged:
    """What a model makes of some rows, and what is true of them."""

    classes: tuple[str, ...]
    raw: np.ndarray
    """(N, C) probabilities before the decision's calibration."""
    decision: Decision
    y: np.ndarray | None = None
    """(N,) class numbers, -1 where unknown; None without labels."""
    sites: np.ndarray | None = None
    """(N,) names; None where the rows do not say."""
    x: Tensor | None = None
    """(N, ...) the model's input; None for a model that takes rows as they are."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Columns that identify each row."""
    notes: tuple[str, ...] = ()
    preprocessing: dict[str, Any] = field(default_factory=dict)
    """The model's, which names the inputs."""

    @property
    def p(self) -> np.ndarray:
        """(N, C) calibrated probabilities."""
        return self.decision.probabilities(self.raw).astype(np.float32)

    @property
    def labelled(self) -> Judged:
        """The rows with a label; ``FedtailError`` if there are none."""
        if self.y is None or not (self.y >= 0).any():
            none = "these rows have no labels"
            if self.y is not None:
                none = f"no label is one of the model's classes ({listing(self.classes, 12)})"
            raise FedtailError(f"{none}; name the label column with --label")
        return self.part(self.y >= 0)

    def part(self, kept: np.ndarray) -> Judged:
        """Some of the rows."""
        return replace(
            self,
            raw=self.raw[kept],
            y=None if self.y is None else self.y[kept],
            sites=None if self.sites is None else self.sites[kept],
            x=None if self.x is None else self.x[torch.from_numpy(kept)],
            identity={name: np.asarray(values)[kept] for name, values in self.identity.items()},
        )

    @property
    def scores(self) -> Scores:
        """Counts of these rows, all of them labelled: the sum over sites of what each of them counts."""
        assert self.y is not None
        parts = self.by_site().values() or [self]
        scores = total(Scores.of(part.p, part.y, part.decision.answers(part.p)) for part in parts if part.y is not None)
        assert scores is not None
        return scores

    def by_site(self) -> dict[str, Judged]:
        """The rows of each site, in the order of names; empty where the rows do not say."""
        if self.sites is None:
            return {}
        return {str(name): self.part(self.sites == name) for name in np.unique(self.sites)}


@dataclass(frozen=True)
class _Source:
    """A model of whatever kind."""

    classes: tuple[str, ...]
    decision: Decision
    inputs: Callable[[Any, list[str]], Any]
    """Rows as they are read -> the model's input; appends notes."""
    probabilities: Callable[[Any], np.ndarray]
    """The model's input -> (N, C) before the decision's calibration."""
    preprocessing: dict[str, Any] = field(default_factory=dict)


def judge(
    model: SavedModel | str | Path,
    data: Path | pd.DataFrame,
    *,
    label: str | None = None,
    site: str | None = None,
    keep: Sequence[str] = (),
    allow_code: bool = True,
) -> Judged:
    """Read rows and predict them.

    Args:
        model: a loaded model, a run folder, an ``.onnx`` file, or ``file.py:name`` of something with ``predict_proba``
            and ``classes_`` (scikit-learn's or your own), which gets the table as a DataFrame without label and site.
        data: a table or its file, a ``.npy`` file, an image or a folder of images (``site/class/*`` or ``class/*``,
            where folder names are classes).
        label: the label column; default: the one trained on. site: the column that names the site, likewise.
        keep: columns of the table that identify rows. allow_code: whether code that ``model`` names may be imported.
    """
    source = _source(model, label, site, allow_code)
    rows = _read(data, label, site, keep, source)
    x = source.inputs(rows.input, rows.notes)
    raw = np.empty((len(x), len(source.classes)), dtype=np.float32)
    owner = np.zeros(len(x)) if rows.sites is None else rows.sites
    for one in np.unique(owner):  # as sites would: rows that go through a network together can change its last bits
        kept = np.flatnonzero(owner == one)
        raw[kept] = source.probabilities(x[torch.from_numpy(kept)] if isinstance(x, Tensor) else x.iloc[kept])
    return Judged(
        classes=source.classes,
        raw=raw,
        decision=source.decision,
        y=rows.y,
        sites=rows.sites,
        x=x if isinstance(x, Tensor) else None,
        identity=rows.identity or {"row": np.arange(1, len(x) + 1)},
        notes=tuple(rows.notes),
        preprocessing=source.preprocessing,
    )


def _source(model: SavedModel | str | Path, label: str | None, site: str | None, allow_code: bool) -> _Source:
    if str(model).endswith(".onnx"):
        return _onnx(Path(str(model)))
    if isinstance(model, SavedModel) or ":" not in str(model) or Path(model).exists():
        saved = model if isinstance(model, SavedModel) else load_model(model, allow_code=allow_code)
        plain = replace(saved, decision=Decision()).probabilities
        return _Source(saved.classes, saved.decision, saved.inputs, plain, saved.preprocessing)
    if not allow_code:
        raise FedtailError(f"--model {str(model)!r} is code; to import it, pass --allow-code")
    if label is None:
        raise FedtailError(f"model {str(model)!r} does not know the label column; name it with --label")
    return _estimator(str(model), [label] if site is None else [label, site])


@dataclass
class _Rows:
    input: Any
    notes: list[str] = field(default_factory=list)
    y: np.ndarray | None = None
    sites: np.ndarray | None = None
    identity: dict[str, Any] = field(default_factory=dict)


def _read(
    data: Path | pd.DataFrame, label: str | None, site: str | None, keep: Sequence[str], source: _Source
) -> _Rows:
    """Rows with labels and sites where they have some; what a column is called falls back on the training data."""
    preprocessing = source.preprocessing
    if isinstance(data, pd.DataFrame) or (data.is_file() and is_table(data)):
        if isinstance(data, pd.DataFrame):
            table = from_frame(data)
        else:
            plain = {label} if label else set()
            table = read_for(data, preprocessing) if preprocessing else read_table(data, plain=plain)
        frame, columns = table.frame, list(table.frame.columns)
        for what, name in (("label", label), ("site", site), *(("kept", name) for name in keep)):
            if name is not None:
                need_column(what, name, columns, f"table {table.name!r}")
        label, site = label or preprocessing.get("label"), site or preprocessing.get("site")
        rows = _Rows(table, identity={name: frame[name].to_numpy() for name in keep})
        rows.y = _codes(frame[label], source.classes, rows.notes) if label in columns else None
        rows.sites = frame[site].astype(str).to_numpy() if site in columns else None
        return rows
    for flag, name in (("--label", label), ("--site", site), ("--keep", keep[0] if keep else None)):
        if name is not None:
            raise FedtailError(f"{flag} {name!r} names a column, but {str(data)!r} is not a table")
    if not data.is_dir():
        return _Rows(data, identity={} if data.suffix == ".npy" else {"file": [str(data)]})
    files = image_files(data)
    rows = _Rows(list(files), identity={"file": [str(path) for path in files]})
    places = np.array(class_places([path.parent.name for path in files], source.classes))
    if (places >= 0).any():
        rows.y = places
        if any(path.parent.parent != data and path.parent != data for path in files):
            rows.sites = np.array([path.parent.parent.name for path in files])
    return rows


def _codes(column: pd.Series[Any], classes: tuple[str, ...], notes: list[str]) -> np.ndarray:
    """(N,) the class of each row, -1 where it is missing or not one of the model's."""
    codes, names = name_codes(column)
    places = class_places(names, classes)
    y = np.array([*places, -1])[codes]
    strange = [repr(name) for name, place in zip(names, places, strict=True) if place < 0]
    if strange:
        rows = int(((codes >= 0) & (y < 0)).sum())
        notes.append(f"{plural(rows, 'row')} with a class unknown to the model ({listing(strange, 5)}): not judged")
    return y


def _onnx(path: Path) -> _Source:
    try:
        import onnxruntime
    except ImportError:
        raise FedtailError("judging an ONNX file needs onnxruntime: pip install onnxruntime") from None
    if not path.is_file():
        raise FedtailError(f"there is no file {str(path)!r}")
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        about = json.loads(session.get_modelmeta().custom_metadata_map["fedtail"])
        classes, shape = tuple(about["classes"]), tuple(about["input_shape"])
        preprocessing, known = about["preprocessing"], about.get("sites")
        decision = Decision.from_json(about.get("decision", {}))
    except (KeyError, ValueError, TypeError):
        raise FedtailError(f"{str(path)!r} was not written by `fedtail export`: it does not name its classes") from None
    except Exception as error:  # onnxruntime has an exception of its own for each way to be no ONNX file
        raise FedtailError(f"{str(path)!r} is not an ONNX file that can be run: {first_line(error)}") from None
    name = session.get_inputs()[0].name

    def inputs(rows: Any, notes: list[str]) -> Tensor:
        x = prepare_inputs(rows, preprocessing, shape, notes)
        if not known:
            return x
        sites = torch.from_numpy(site_numbers(rows, preprocessing, known, len(x)))
        return torch.cat([x.float(), sites[:, None]], dim=1)  # trees that split by the site take its number last

    def probabilities(x: Tensor) -> np.ndarray:
        parts = (session.run(["probabilities"], {name: part.float().numpy()})[0] for part in x.split(1024))
        return np.concatenate(list(parts))

    # the graph has calibrated already
    return _Source(classes, replace(decision, temperature=1.0, bias=()), inputs, probabilities, preprocessing)


def _estimator(name: str, not_inputs: Sequence[str]) -> _Source:
    model = load_object("model", name)
    if not hasattr(model, "predict_proba") or not hasattr(model, "classes_"):
        raise FedtailError(f"model {name!r} has no predict_proba and classes_; give a fitted classifier")
    classes = tuple(str(c) for c in model.classes_)

    def inputs(rows: Any, notes: list[str]) -> pd.DataFrame:
        if not isinstance(rows, Table):
            raise FedtailError(f"model {name!r} takes tables; these rows are not one")
        return rows.frame.drop(columns=list(not_inputs))

    def probabilities(part: pd.DataFrame) -> np.ndarray:
        try:
            raw = np.asarray(model.predict_proba(part), dtype=np.float64)
        except Exception as error:
            raise in_user_code("model", name, error) from error
        if raw.shape != (expected := (len(part), len(classes))):
            raise FedtailError(f"model {name!r}: predict_proba gave {raw.shape}, not {expected}")
        return raw

    return _Source(classes, Decision(), inputs, probabilities)
