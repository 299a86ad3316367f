"""Images -> features, each image once: encoded on all cores, kept on disk under the hash of its pixels.

An image is encoded by itself on one thread, so its features are the same bits whatever else is encoded beside it: in a
simulation, at a site, or when a trained model predicts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedtail.cores import usable_cores
from fedtail.data.images.decode import write_cache
from fedtail.data.sources import cache_root
from fedtail.files import locked

Progress = Callable[[int, int], None]
"""Called with the images done and all of them."""
CHUNK = 1024
"""Images between two writes to the cache: what an interruption costs at most."""


def encode_images(
    x: Tensor,
    encode: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    key: str,
    *,
    store: Path | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """(N, *shape) features of stored images.

    Args:
        x: (N, C, height, width) pixels.
        encode: (1, C, height, width) -> (1, *shape); called from several threads.
        key: what else the features depend on: the encoder's hash.
        store: folder that features are kept in, see ``feature_store``; None keeps none.
    """
    out = torch.empty(len(x), *shape)
    ids = [_identity(image) for image in x]
    folder = None if store is None else store / key
    known = np.zeros(len(ids), dtype=bool) if folder is None else _read(folder, ids, out)

    def work(i: int) -> None:
        with torch.no_grad():
            out[i] = encode(x[i][None])[0]

    with ExitStack() as inside:
        if folder is not None and not known.all():
            lock = _place(folder, ids).with_suffix(".lock")
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                lock.touch()
            inside.enter_context(locked(lock, wait=True))
            known = _read(folder, ids, out)  # what another process has encoded meanwhile
        todo = np.flatnonzero(~known)
        done = len(x) - len(todo)
        inside.enter_context(_one_thread_each())
        pool = inside.enter_context(ThreadPoolExecutor(usable_cores()))
        for start in range(0, len(todo), CHUNK):
            part = todo[start : start + CHUNK]
            for _ in pool.map(work, part.tolist()):
                done += 1
                if progress is not None:
                    progress(done, len(x))
            if folder is not None:
                _write(folder, [ids[i] for i in part], out[torch.from_numpy(part)])
    return out


def feature_store() -> Path:
    """The user's own cache of features."""
    return cache_root() / "features"


def _identity(image: Tensor) -> bytes:
    about = f"{tuple(image.shape)} {image.dtype} 0".encode()
    return hashlib.sha256(about + image.contiguous().numpy().tobytes()).digest()[:16]


def _place(folder: Path, ids: Sequence[bytes]) -> Path:
    return folder / f"{hashlib.sha256(b''.join(ids)).hexdigest()[:32]}.safetensors"


def _read(folder: Path, ids: Sequence[bytes], out: Tensor) -> np.ndarray:
    """(N,) which features were on disk; they are in ``out`` then."""
    known = np.zeros(len(ids), dtype=bool)
    where: dict[bytes, list[int]] = {}
    for i, name in enumerate(ids):
        where.setdefault(name, []).append(i)
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        with suppress(SafetensorError, OSError), safe_open(file, "pt") as stored:  # a damaged file is encoded again
            rows = [bytes(row) for row in stored.get_tensor("ids").numpy()]
            hits = [(j, i) for j, name in enumerate(rows) for i in where.get(name, ()) if not known[i]]
            if not hits or (values := stored.get_tensor("x")).shape[1:] != out.shape[1:]:
                continue
            here, there = (torch.tensor(column) for column in zip(*hits, strict=True))
            out[there] = values[here]
            known[there.numpy()] = True
    return known


def _write(folder: Path, ids: Sequence[bytes], x: Tensor) -> None:
    """A file of its own for every part."""
    table = torch.from_numpy(np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(len(ids), 16).copy())
    write_cache(_place(folder, ids), ids=table, x=x.contiguous())


@contextmanager
def _one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
