"""Use a trained model: ``ft.load_model("runs/x").predict(new_rows)``."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedtail.boosting.model import Shape, TreesModule, with_site
from fedtail.core.decisions import COVERAGES, Decision
from fedtail.core.promise import prediction_sets
from fedtail.data.federation import Federation, Transform
from fedtail.data.images.features import encode_images
from fedtail.data.inputs import prepare_inputs, read_for
from fedtail.data.inspection import About, describe
from fedtail.data.tables.labels import as_labels
from fedtail.data.tables.read import Table, is_table
from fedtail.errors import FedtailError, one_of
from fedtail.files import write_atomically
from fedtail.models import build_model
from fedtail.models.device import check_device
from fedtail.models.encoders.base import Encoding
from fedtail.models.encoders.opening import is_code, use_encoder
from fedtail.registry import is_own
from fedtail.rounds.history import plain
from fedtail.runs.encoding import build_encoded

FORMAT = 1
WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d*")


@dataclass
class SavedModel:
    """A trained model with everything between raw data and class names."""

    module: nn.Module
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    transform: Transform = field(default_factory=Transform)
    preprocessing: dict[str, Any] = field(default_factory=dict)
    name: str = "model"
    """The data it was trained on."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    architecture: dict[str, Any] = field(default_factory=dict)
    """Registered name and options, by which ``load_model`` builds the module again."""
    decision: Decision = field(default_factory=Decision)
    """How probabilities are calibrated and become answers."""
    sites: dict[str, Decision] = field(default_factory=dict)
    """Site -> its own decision; see ``at``."""
    site: str | None = None
    """The site that all rows are of, where the model knows sites and the data do not name them."""
    label_type: str = ""
    """What ``predict`` answers with: ``str``, ``int``, ``float`` or ``bool``."""
    encoding: Encoding | None = None
    """The pretrained encoder in front of ``module``, which then takes its features. It is kept by name and hash."""

    @classmethod
    def of(cls, module: nn.Module, federation: Federation) -> SavedModel:
        """A module trained in memory (``fit(...).module``) with the federation's classes and preprocessing."""
        return cls.of_run(module, describe(federation))

    @classmethod
    def of_run(cls, module: nn.Module, about: About, architecture: dict[str, Any] | None = None) -> SavedModel:
        """A trained module with the classes and preprocessing of the run's data."""
        return cls(
            module=module,
            classes=tuple(about.classes),
            input_shape=tuple(about.input_shape),
            transform=about.transform,
            preprocessing=plain(about.preprocessing),
            name=about.name,
            device=next(itertools.chain(module.parameters(), module.buffers())).device,
            architecture=plain(architecture or {}),
            label_type=about.label_type,
            encoding=Encoding.from_dict(about.encoder) if about.encoder else None,
        )

    @cached_property
    def front(self) -> nn.Module | None:
        """The encoder: stored pixels -> features; None if the model has none."""
        return None if self.encoding is None else use_encoder(self.encoding).front(self.encoding.unfreeze)

    def save(self, folder: str | Path) -> Path:
        """Write ``model.safetensors`` and ``model.json`` for ``load_model``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {k: v.detach().cpu().contiguous().clone() for k, v in self.module.state_dict().items()}
        write_atomically(folder / "model.safetensors", save(weights))
        write_atomically(folder / "model.json", json.dumps(self.describe(), indent=1))
        return folder

    def describe(self) -> dict[str, Any]:
        """The content of ``model.json``: everything but the weights."""
        return {
            "format": FORMAT,
            "architecture": self.architecture,
            "input_shape": list(self.input_shape),
            "classes": list(self.classes),
            **({"label_type": self.label_type} if self.label_type else {}),
            "transform": asdict(self.transform),
            "preprocessing": self.preprocessing,
            "data": self.name,
            **({} if self.encoding is None else {"encoder": self.encoding.to_dict()}),
            **({} if self.decision == Decision() else {"decision": self.decision.to_json()}),
            **({"sites": {name: one.to_json() for name, one in self.sites.items()}} if self.sites else {}),
        }

    def at(self, site: str) -> SavedModel:
        """Return the model with one site's decision rule: ``load_model("runs/x").at("DL").predict(rows)``."""
        known = self.architecture.get("sites", [])
        if not self.sites and not known:
            raise FedtailError("this model has no per-site decisions; train with decision.scope = 'site'")
        if site not in self.sites and site not in known:
            raise one_of("site", site, self.sites or known)
        return replace(self, decision=self.sites.get(site, self.decision), site=site if site in known else None)

    def predict(self, data: Any, batch_size: int = 1024) -> np.ndarray:
        """(N,) labels, of the type that they had in training.

        ``data``: a DataFrame, a list of dicts, a path to a table, image, folder of images or ``.npy`` file, a list of
        image paths or PIL images, or an array of samples as they were stored for training.
        """
        return self.answers(self.predict_proba(data, batch_size))

    def answers(self, probabilities: np.ndarray) -> np.ndarray:
        """(N,) labels from (N, C) probabilities, by the model's decision."""
        return self.labels[self.decision.answers(probabilities)]

    @property
    def labels(self) -> np.ndarray:
        """(C,) the classes as labels of the type that they had in training. Whole numbers in a file are integers."""
        kind = self.label_type
        if not kind and self.preprocessing.get("kind") == "table" and all(map(WHOLE_NUMBER.fullmatch, self.classes)):
            kind = "int"
        return as_labels(self.classes, kind)

    def sets(self, probabilities: np.ndarray, coverage: float = 0.95) -> list[tuple[str, ...]]:
        """Return for each row the classes that hold the truth in ``coverage`` of the cases of every class.

        probabilities: (N, C) of ``predict_proba``. The sets were found on private validation rows.
        """
        members = prediction_sets(probabilities, self._limits(coverage))
        return [tuple(name for name, inside in zip(self.classes, row, strict=True) if inside) for row in members]

    def in_every_set(self, coverage: float = 0.95) -> list[str]:
        """Return the classes that had too few validation rows for a limit of their own."""
        return [name for name, least in zip(self.classes, self._limits(coverage), strict=True) if not least]

    def _limits(self, coverage: float) -> tuple[float, ...]:
        if coverage not in COVERAGES:
            raise one_of("coverage", coverage, map(str, COVERAGES))
        if not self.decision.sets:
            raise FedtailError("this model has no sets: it was trained without validation rows; raise data.validation")
        return self.decision.sets[COVERAGES.index(coverage)]

    def predict_proba(self, data: Any, batch_size: int = 1024) -> np.ndarray:
        """(N, C) float32 class probabilities, in the order of ``classes``."""
        notes: list[str] = []
        x = self.inputs(data, notes)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return self.probabilities(x, batch_size)

    def inputs(self, data: Any, notes: list[str]) -> Tensor:
        """(N, *input_shape) as stored for training; notes about the data are appended to ``notes``."""
        known = self.architecture.get("sites", [])
        if known and isinstance(data, str | Path) and is_table(data):  # the column that names sites is needed too
            data = read_for(Path(data), self.preprocessing)
        # Another memory order, as of channels-last images, would change the last bits of a convolution.
        x = prepare_inputs(data, self.preprocessing, self.input_shape, notes).contiguous()
        if not known or not isinstance(self.module, TreesModule):
            return x
        sites = np.array(known.index(self.site)) if self.site else site_numbers(data, self.preprocessing, known, len(x))
        return with_site(x, self.module.shape.columns, sites)

    def probabilities(self, x: Tensor, batch_size: int = 1024) -> np.ndarray:
        """(N, C) float32 from stored samples. Batches change at most the last bits."""
        self.module.eval()
        if self.encoding is not None:
            assert self.front is not None
            x = encode_images(x, self.front, self.encoding.shape, "")
        with torch.no_grad():
            parts = [
                torch.softmax(self.module(self.transform(part.to(self.device))), dim=-1).cpu()
                for part in x.split(max(1, batch_size))
            ]
        return self.decision.probabilities(torch.cat(parts).numpy()).astype(np.float32)


def site_numbers(data: Any, preprocessing: dict[str, Any], known: Sequence[str], n: int) -> np.ndarray:
    """(n,) the place among the known sites of each row's, -1 for others and where the data have no such column."""
    frame = data.frame if isinstance(data, Table) else pd.DataFrame(data) if _is_records(data) else data
    column, numbers = preprocessing.get("site"), {name: k for k, name in enumerate(known)}
    if not isinstance(frame, pd.DataFrame) or column not in frame.columns:
        return np.full(n, -1)
    return np.array([numbers.get(str(value), -1) for value in frame[column]])


def _is_records(data: Any) -> bool:
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(row, dict) for row in data)


def load_model(
    path: str | Path, *, device: str = "cpu", module: nn.Module | None = None, allow_code: bool = False
) -> SavedModel:
    """A model from a run folder (or its ``model.json``). Only tensors and JSON are read, nothing is unpickled.

    A model of your own (``module:callable``) is code: pass ``allow_code=True`` to have it imported, or the
    ``module`` itself.
    """
    check_device("--device", device)
    folder, about = read_description(path)
    where = str(folder / "model.json")
    try:
        scaling = about.get("transform", {})
        saved = SavedModel(
            module=nn.Identity(),
            classes=tuple(str(c) for c in about["classes"]),
            input_shape=tuple(int(n) for n in about["input_shape"]),
            transform=Transform(
                float(scaling.get("scale", 1.0)), tuple(scaling.get("mean", ())), tuple(scaling.get("std", ()))
            ),
            preprocessing=dict(about.get("preprocessing", {})),
            name=str(about.get("data", "model")),
            device=torch.device(device),
            architecture=dict(about["architecture"]),
            decision=Decision.from_json(about.get("decision", {})),
            sites={str(name): Decision.from_json(one) for name, one in dict(about.get("sites", {})).items()},
            label_type=str(about.get("label_type", "")),
            encoding=Encoding.from_dict(about["encoder"]) if about.get("encoder") else None,
        )
        for one in (saved.decision, *saved.sites.values()):
            one.check(len(saved.classes))
    except (TypeError, ValueError, AttributeError) as error:
        raise FedtailError(f"{where!r} is damaged ({error}); restore an intact copy, or train again") from None
    encoding, architecture, n_classes = saved.encoding, saved.architecture, len(saved.classes)
    if encoding is not None and is_code(encoding.name) and not allow_code:
        raise _own_code(where, encoding.name)
    if module is None:
        if not architecture.get("name"):
            raise FedtailError(f"{where!r} does not say how its model is built; pass load_model(..., module=...)")
        name = str(architecture["name"])
        if is_own(name) and not allow_code:
            raise _own_code(where, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what BatchNorm means for training is no news here
            options = architecture.get("options", {})
            if name == "trees":
                module = TreesModule(Shape.from_json(options))
            elif encoding is None:
                module = build_model(name, saved.input_shape, n_classes, **options)
            else:
                module = build_encoded(encoding, name, n_classes, **options)
    _load_weights(module, folder / "model.safetensors")
    saved.module = module.to(device).eval()
    return saved


def _own_code(where: str, name: str) -> FedtailError:
    return FedtailError(f"{where!r} uses custom code, {name!r}; to import it, pass allow_code=True (--allow-code)")


def read_description(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """(run folder, content of ``model.json``), checked for the keys that prediction needs."""
    path = Path(path)
    folder = path.parent if path.name == "model.json" else path
    try:
        about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        hint = "the run has not finished" if (folder / "config.toml").is_file() else "is it a run folder?"
        raise FedtailError(f"{str(folder)!r} has no model.json; {hint}") from None
    except (OSError, ValueError) as error:
        raise FedtailError(f"{str(folder / 'model.json')!r} cannot be read: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise FedtailError(
            f"{str(folder / 'model.json')!r} does not have format {FORMAT}; it was written by another version "
            "of fedtail"
        )
    for key in ("architecture", "classes", "input_shape"):
        if key not in about:
            raise FedtailError(f"{str(folder / 'model.json')!r} lacks {key!r}")
    return folder, about


def read_decision(path: str | Path, n_classes: int) -> Decision:
    """A decision as a site keeps it (``decision.json``)."""
    try:
        decision = Decision.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        decision.check(n_classes)
    except OSError as error:
        raise FedtailError(f"decision file {str(path)!r} cannot be read: {error.strerror}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise FedtailError(
            f"{str(path)!r} is not a decision for this model ({error}); use the site's own file"
        ) from None
    return decision


def _load_weights(module: nn.Module, path: Path) -> None:
    try:
        weights = load_file(path)
        module.load_state_dict(weights)
    except FileNotFoundError:
        raise FedtailError(f"weights file {str(path)!r} does not exist") from None
    except (OSError, SafetensorError) as error:
        raise FedtailError(f"{str(path)!r} is not a complete safetensors file: {error}") from error
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise FedtailError(
            f"{str(path)!r} does not match the model: {lines[min(1, len(lines) - 1)].strip()}"
        ) from error
