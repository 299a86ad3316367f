"""New data -> the form training data was stored in, by the preprocessing that a model was saved with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from fedtail.data.images.decode import EXTENSIONS, decode, image_pixels, read_image
from fedtail.data.tables.encode import encode, frame_columns, from_layout
from fedtail.data.tables.read import Table, from_frame, is_table, read_table
from fedtail.data.tables.schema import TableSchema
from fedtail.errors import FedtailError
from fedtail.words import listing

Preprocessing = dict[str, Any]


def prepare_inputs(data: Any, preprocessing: Preprocessing, input_shape: tuple[int, ...], notes: list[str]) -> Tensor:
    """(N, *input_shape), before the model's ``Transform``.

    ``data``: a DataFrame or records (tables), a path or paths (tables, images, ``.npy``), PIL images, or an array of
    samples in stored form. What had to be worked around, such as levels never seen in training, goes to ``notes``.
    """
    kind = preprocessing.get("kind")
    if isinstance(data, str | Path):
        return _from_path(Path(data), preprocessing, input_shape, notes)
    if isinstance(data, pd.Series):
        raise FedtailError("pass a single row as a DataFrame (frame.loc[[i]]) or a list of one dict, not as a Series")
    if isinstance(data, Table):
        notes += data.notes
        data = data.frame
    if isinstance(data, dict | Image.Image):
        data = [data]
    if isinstance(data, list | tuple) and data and all(isinstance(d, str | Path | Image.Image) for d in data):
        return _from_images(data, input_shape)
    if isinstance(data, list | tuple) and data and all(isinstance(d, dict) for d in data):
        data = pd.DataFrame(list(data))
    if kind == "table" and isinstance(data, list | tuple):
        raise FedtailError("pass table rows as a DataFrame or a list of dicts, so that columns have names")
    if kind == "table" and not isinstance(data, pd.DataFrame):
        data = _named_columns(data, preprocessing)
    if isinstance(data, pd.DataFrame):
        return _from_frame(data, preprocessing, input_shape, notes)
    return _from_array(data, preprocessing, input_shape)


def _named_columns(data: Any, preprocessing: Preprocessing) -> Any:
    """A raw array of rows, where the model was trained on one, as a table: its columns are called by their numbers."""
    schema, rows = saved_schema(preprocessing), np.asarray(data)
    if schema is None or rows.ndim != 2:
        return data
    names = [str(i) for i in range(rows.shape[1])]
    known = {*schema.left_out, *(column.name for column in schema.columns)}
    return pd.DataFrame(rows, columns=names) if known == set(names) else data


def read_for(path: Path, preprocessing: Preprocessing) -> Table:
    """A table file, with the columns that are names read as text."""
    if (schema := saved_schema(preprocessing)) is None:
        return read_table(path)
    return read_table(path, text={c.name for c in schema.columns if c.kind != "numeric"}, plain={schema.label})


def saved_schema(preprocessing: Preprocessing) -> TableSchema | None:
    """The schema that a model was saved with, by any version; None where it was trained on something else."""
    kind = preprocessing.get("kind")
    if kind == "layout":
        return from_layout(preprocessing)
    return TableSchema.from_dict(preprocessing, "the model's preprocessing") if kind == "table" else None


def image_files(folder: Path) -> list[Path]:
    """All images under a folder, in order."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
    if not files:
        raise FedtailError(f"no images ({', '.join(sorted(EXTENSIONS))}) under {str(folder)!r}")
    return files


def _from_path(path: Path, preprocessing: Preprocessing, input_shape: tuple[int, ...], notes: list[str]) -> Tensor:
    if path.is_dir():
        return _from_images(image_files(path), input_shape)
    if not path.is_file():
        raise FedtailError(f"there is no file {str(path)!r}")
    if path.suffix.lower() in EXTENSIONS:
        return _from_images([path], input_shape)
    if path.suffix.lower() == ".npy":
        try:
            return _from_array(np.load(path, allow_pickle=False), preprocessing, input_shape)
        except (ValueError, OSError, EOFError) as error:
            raise FedtailError(f"{str(path)!r} is not a plain array file: {error}") from error
    if not is_table(path):
        raise FedtailError(f"{str(path)!r} is neither a table (CSV, TSV, Parquet), an image, nor a .npy array")
    return prepare_inputs(read_for(path, preprocessing), preprocessing, input_shape, notes)


def _from_frame(
    frame: pd.DataFrame, preprocessing: Preprocessing, input_shape: tuple[int, ...], notes: list[str]
) -> Tensor:
    kind = preprocessing.get("kind")
    if not len(frame):
        raise FedtailError("the table has no rows to predict")
    if (schema := saved_schema(preprocessing)) is not None:
        named = frame if schema.strict else from_frame(frame).frame
        return torch.from_numpy(encode(schema, frame_columns(schema, named, "the table"), notes=notes))
    if kind == "images":
        raise FedtailError("this model takes images, not a table")
    try:
        values = frame.to_numpy(dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise FedtailError(f"this model was trained on arrays; its table may contain only numbers ({error})") from error
    return _from_array(values, preprocessing, input_shape)


def _from_images(items: Sequence[str | Path | Image.Image], input_shape: tuple[int, ...]) -> Tensor:
    if len(input_shape) != 3:
        raise FedtailError(f"this model takes samples of shape {input_shape}, not images")
    channels, height, width = input_shape
    if channels not in (1, 3):
        raise FedtailError(f"this model takes images with {channels} channels; give arrays instead of files")
    paths = [Path(i) for i in items if not isinstance(i, Image.Image)]
    if len(paths) == len(items):
        absent = next((p for p in paths if not p.is_file()), None)
        if absent is not None:
            raise FedtailError(f"there is no image {str(absent)!r}")
        decoded = decode(Path(), paths, (height, width), channels, cache=False)
        if decoded.bad:
            i, reason = next(iter(decoded.bad.items()))
            raise FedtailError(f"cannot read {str(paths[i])!r}: {reason}")
        return decoded.x
    size = height, width
    pixels = [
        image_pixels(i, size, channels) if isinstance(i, Image.Image) else read_image(Path(i), size, channels)
        for i in items
    ]
    return torch.from_numpy(np.stack(pixels))


def _from_array(data: Any, preprocessing: Preprocessing, input_shape: tuple[int, ...]) -> Tensor:
    """Samples in stored form; one sample, missing channel axes and channels-last images are brought into shape."""
    try:
        x = data.detach().cpu() if isinstance(data, Tensor) else torch.as_tensor(np.require(data, requirements="W"))
    except (TypeError, ValueError) as error:
        raise FedtailError(f"cannot make samples of shape {input_shape} from {type(data).__name__}: {error}") from error
    given = tuple(x.shape)
    if given == input_shape:
        x = x.unsqueeze(0)
    elif len(input_shape) == 3 and input_shape[0] == 1 and given[-2:] == input_shape[1:] and x.ndim in (2, 3):
        x = x.reshape(-1, *input_shape)
    elif len(input_shape) == 3 and given[-3:] == (*input_shape[1:], input_shape[0]) and x.ndim in (3, 4):
        x = x.reshape(-1, *given[-3:]).permute(0, 3, 1, 2)
    if tuple(x.shape[1:]) != input_shape:
        if schema := saved_schema(preprocessing):
            names = listing([*(column.name for column in schema.columns), *schema.left_out])
            has = f"the table's columns ({names}) nor its {input_shape[0]} encoded features"
            raise FedtailError(f"rows of shape {given} have neither {has}; pass a DataFrame")
        raise FedtailError(f"samples must have shape (N, {', '.join(map(str, input_shape))}), not {given}")
    if not len(x):
        raise FedtailError("no samples to predict")
    if x.is_floating_point():
        rows = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten().tolist()
        if rows:
            raise FedtailError(f"samples must be finite; these rows are not: {listing(rows, 5)}")
        if preprocessing.get("kind") == "images" and float(x.max()) <= 1.0:
            raise FedtailError("pixels must be 0 to 255, as in the files trained on, not 0 to 1; multiply by 255")
        x = x.float()
    return x
