"""Messages that nobody meant, to every reader of messages at the server and at a site.

    python benchmarks/fuzz.py                        100,000 messages
    python benchmarks/fuzz.py --messages 2000 --seed 7

Valid messages of every phase are taken from a small federation in this process, and spoiled: bytes flipped, cut and
doubled, JSON values, keys and nesting, tensor headers, types, shapes and values, parts left out, renamed and made up.
The server's readers may raise ``WireError`` and nothing else; a site must answer, with one of its fixed codes or a
reply that can be read. Memory must not grow by more than twice the largest size that a message may have by its budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

import fedtail.federate.engine
import fedtail.federate.protocol.handshake
import fedtail.federate.relay
import fedtail.federate.statistics
from fedtail.core.candidates import binary_candidates
from fedtail.core.records import Task, Update
from fedtail.data import DATASETS, Federation, partition
from fedtail.federate.agreed import run_document, write_document
from fedtail.federate.engine import RemoteEngine
from fedtail.federate.exchanges import Journal
from fedtail.federate.operate.certificates import make_site_key
from fedtail.federate.protocol.faults import CODES
from fedtail.federate.protocol.handshake import say_hello
from fedtail.federate.protocol.job import Job
from fedtail.federate.protocol.limits import Budget, Kind, WireError
from fedtail.federate.protocol.policy import Policy
from fedtail.federate.protocol.transport import InProcess, Phase, exchange
from fedtail.federate.protocol.wire import META, Parts, pack, pack_update, unpack
from fedtail.federate.relay import Relay, RelayTotals
from fedtail.federate.site import frames
from fedtail.federate.site.prepared import FederationSlice
from fedtail.federate.site.site import Site
from fedtail.federate.statistics import agree_on_preprocessing
from fedtail.rounds.acceptance import fault
from fedtail.settings import Settings

K = 3
NASTY: tuple[Any, ...] = (
    -1, 0, 1, 10**12, 10**40, 1e308, -1e308, 0.5, True, None, "", "x" * 5000, "\x1b[2J\x1b]0;x\x07", "north", [], {},
    [[]] * 50, [0] * 5000, {"a": {"b": {}}}, "F8_E4M3", "delta", [1e300], [None], ["1"], "fedavg", "../../etc/passwd",
)  # fmt: skip
RAW = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 400, b"[" * 100_000, b'{"a":' * 5000, b'"\\ud800"', b"\xff")
TYPES = ("F8_E4M3", "F8_E5M2", "F16", "F64", "I8", "U64", "BOOL", "C64", "", 3)
SHAPES = ([1 << 60], [-1], [0, 1 << 40], [1] * 40, [1 << 31, 1 << 31], [], [2.5], ["3"], [1 << 20, 400])


class Everything:
    """A reader of each message: what a federation of three sites would do with it."""

    def __init__(self) -> None:
        pooled = DATASETS.build("blobs", n_max=40, n_features=4, n_classes=3, spread=2.0)
        self.federation: Federation = partition(
            pooled.train, pooled.test, clients=K, classes=pooled.classes, transform=pooled.transform
        )
        self.folder = tempfile.TemporaryDirectory()
        root, policy = Path(self.folder.name), Policy()
        self.names = [f"site {k}" for k in range(K)]
        for name in self.names:
            (root / name).mkdir()
            make_site_key(root / name, name)
        listed = "".join((root / name / "site.pub").read_text() for name in self.names)
        for name in self.names:
            (root / name / "sites.pub").write_text(listed)
        self.sites = {
            k: Site(name, FederationSlice(self.federation, k), policy, root / name) for k, name in enumerate(self.names)
        }
        self.asked: list[tuple[str, Parts]] = []
        self.replies: list[tuple[Phase, Parts, Callable[[Parts], object], Budget]] = []
        self._record()

    def _record(self) -> None:
        """Every phase once, with the readers and budgets that the server has for it."""
        outer = self

        class Wires(InProcess):
            def _ask(self, client: int, phase: str, parts: Parts) -> Parts:
                if client == 1:
                    outer.asked.append((phase, parts))
                return super()._ask(client, phase, parts)

        def recorded(transport: Any, phase: Phase, parcels: Any, read: Any, timeout: Any, budget: Budget) -> Any:
            def taking(client: int, parcel: Any) -> Any:
                return read(client, parcel)

            kept: dict[int, Parts] = {}

            class Keeps:
                def exchange(self, phase: str, payloads: Any, timeout: Any, take: Any) -> Any:
                    def both(client: int, parts: Parts) -> None:
                        kept[client] = parts
                        take(client, parts)

                    return transport.exchange(phase, payloads, timeout, both)

            answers = exchange(Keeps(), phase, parcels, taking, timeout, budget)  # type: ignore[arg-type]
            assert not answers.reasons, answers.reasons
            outer.replies.append((phase, kept[1], lambda parts: read(1, unpack(parts, budget)), budget))
            return answers

        modules = (
            fedtail.federate.engine,
            fedtail.federate.relay,
            fedtail.federate.protocol.handshake,
            fedtail.federate.statistics,
        )
        try:
            for module in modules:
                assert module.exchange is exchange, module  # type: ignore[attr-defined]
                module.exchange = recorded  # type: ignore[attr-defined]
            self._play(Wires({k: site.handle for k, site in self.sites.items()}))
        finally:
            for module in modules:
                module.exchange = exchange  # type: ignore[attr-defined]

    def _play(self, wires: InProcess) -> None:
        settings = Settings.of(batch_size=16, seed=3, path="reference")
        say_hello(wires, range(K), 60)
        for method in ("scaffold", "fedcgnm"):
            job = Job(
                run="fuzz", model="mlp", input_shape=self.federation.input_shape, classes=self.federation.classes,
                method=method, rounds=3, model_options={"hidden": (4,)}, local=settings.local, seed=3,
                transform=self.federation.transform,
            )  # fmt: skip
            hellos, _ = say_hello(wires, range(K), 60, job)
            engine = RemoteEngine(
                wires, job, self.federation.sizes, validation_sizes=[hellos[k].n_validation for k in range(K)]
            )
            x, rate = engine.model.vector.clone(), {"rate": np.full((K, 2), 0.4)}
            control = {"control": torch.zeros_like(x)} if method == "scaffold" else {}
            task = Task(0, x, tuple(range(K)), rate, 0.1, control)
            updates, _ = engine.train(task)
            self.task, self.method, self.n_params = task, job.build_method(), engine.model.n_params
            phase, parts, read, budget = self.replies[-1]
            assert phase is Phase.TRAIN, phase
            self.replies[-1] = (phase, parts, self._accepting(read), budget)
            made = binary_candidates(x, np.full(K, 1 / K), [u.delta for u in updates], np.arange(K), K)
            engine.validate(made, range(K))
            engine.confusion(x, "validation")
            list(engine.scores(x, "validation"))
        self._relay(wires)
        schema = {"kind": "images", "name": "x", "classes": ["a", "b"], "input_shape": [3, 8, 8], "augment": None}
        for site in self.sites.values():
            object.__setattr__(site.data, "columns", lambda index, seed: [np.linspace(0.0, 1.0, 640)] * 3)
        agree_on_preprocessing(wires, schema, self.names, 0, 60)

    def _relay(self, wires: InProcess) -> None:
        """An agreement and the first exchanges of a run that the server does not steer."""
        config = Settings.of(batch_size=16, rounds=2, seed=3)
        config = config.model_copy(update={"deploy": config.deploy.model_copy(update={"trust": "blind"})})
        document = write_document(config, self.sites[0].data.schema(), self.names, "fuzz")
        relay = Relay(wires, self.names, 60.0)
        agreement, seed = relay.agree(document)

        class Enough(Exception):
            pass

        def stop(*_: Any) -> None:
            raise Enough

        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Enough):
            totals = RelayTotals(relay, agreement, [range(K)], Journal(Path(folder) / "journal"))
            run_document(document, seed, totals, {}, Path(folder) / "run", engine="fuzz", on_round=stop)

    def _accepting(self, read: Callable[[Parts], Any]) -> Callable[[Parts], object]:
        task, method, n = self.task, self.method, self.n_params
        return lambda parts: fault(read(parts), method, task, 3, n, 0.0)


def spoiled(parts: Parts, rng: np.random.Generator) -> Parts:
    """A message with one to three things wrong, or a made-up one."""
    out = dict(parts)
    for _ in range(int(rng.integers(1, 4))):
        HARMS[int(rng.integers(len(HARMS)))](out, rng)
    return out


def flipped(parts: Parts, rng: np.random.Generator) -> None:
    name = _pick(parts, rng)
    data = bytearray(parts[name])
    how = rng.integers(4)
    if not data:
        return
    at = int(rng.integers(len(data)))
    if how == 0:
        data[at] ^= 1 << int(rng.integers(8))
    elif how == 1:
        del data[at:]
    elif how == 2:
        data += data[: int(rng.integers(1, 1 << 12))]
    else:
        data[at:at] = rng.bytes(int(rng.integers(1, 64)))
    parts[name] = bytes(data)


def json_changed(parts: Parts, rng: np.random.Generator) -> None:
    try:
        meta = json.loads(parts[META])
    except (KeyError, ValueError, RecursionError):
        return
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(inner, (dict, list)):
                walk(inner)

    if isinstance(meta, (dict, list)):
        walk(meta)
    if places:
        holder, key = places[int(rng.integers(len(places)))]
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = NASTY[int(rng.integers(len(NASTY)))]
    parts[META] = json.dumps(meta).encode()


def json_raw(parts: Parts, rng: np.random.Generator) -> None:
    """What no JSON library writes."""
    data, bad = parts.get(META, b"{}"), RAW[int(rng.integers(len(RAW)))]
    marks = [i for i, c in enumerate(data[:4096]) if c == ord(":")]
    if marks and rng.random() < 0.7:
        at = marks[int(rng.integers(len(marks)))] + 1
        parts[META] = data[:at] + bad + b"," + data[at:]
    else:
        parts[META] = data[:-1] + b', "format": 1}' if rng.random() < 0.5 else bad


def header_changed(parts: Parts, rng: np.random.Generator) -> None:
    names = [n for n in parts if n != META and len(parts[n]) > 8]
    if not names:
        return
    name = names[int(rng.integers(len(names)))]
    blob = parts[name]
    length = int.from_bytes(blob[:8], "little")
    try:
        header = json.loads(blob[8 : 8 + length])
        about = header["t"]
        key = ("dtype", "shape", "data_offsets")[int(rng.integers(3))]
        choice: tuple[Any, ...] = {
            "dtype": TYPES,
            "shape": SHAPES,
            "data_offsets": ([0, 1 << 50], [-8, 8], [8, 0], "x"),
        }[key]
        about[key] = choice[int(rng.integers(len(choice)))]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    size = len(text) if rng.random() < 0.9 else int(rng.integers(1 << 62))
    parts[name] = struct.pack("<Q", size) + text + blob[8 + length :]


def values_changed(parts: Parts, rng: np.random.Generator) -> None:
    names = [n for n in parts if n != META]
    if not names:
        return
    name = names[int(rng.integers(len(names)))]
    shape = [(), (1,), (2, 43), (3,), (0,), (1 << 10,), (2, 3, 4)][int(rng.integers(7))]
    dtype = (torch.float32, torch.float64, torch.int64, torch.int8, torch.bfloat16, torch.bool)[int(rng.integers(6))]
    fill = (float("nan"), float("inf"), 3e38, -1, 20, 1 << 62, 0)[int(rng.integers(7))]
    if not (dtype.is_floating_point or isinstance(fill, int)):
        fill = 0
    parts[name] = save({"t": torch.zeros(shape, dtype=torch.float64).fill_(fill).to(dtype)})


def parts_changed(parts: Parts, rng: np.random.Generator) -> None:
    name = _pick(parts, rng)
    how = rng.integers(4)
    if how == 0:
        parts.pop(name)
    elif how == 1:
        parts[("tensor/extra/x", "tensor/" + "y" * 3000, "tensor/\u202e", "x", "")[int(rng.integers(5))]] = parts[name]
    elif how == 2:
        parts |= {f"tensor/report/{i}": parts[name] for i in range(40)}
    else:
        parts[name] = parts[_pick(parts, rng)]


def made_up(parts: Parts, rng: np.random.Generator) -> None:
    """A message of random fields and tensors, with the right format."""
    if rng.random() < 0.5:
        return
    words = (
        "job",
        "client",
        "task",
        "update",
        "round",
        "steps",
        "loss",
        "statistics",
        "schema",
        "site",
        "clock",
        "error",
    )
    meta = {str(rng.choice(words)): NASTY[int(rng.integers(len(NASTY)))] for _ in range(int(rng.integers(8)))}
    parts.clear()
    parts[META] = json.dumps({**meta, "format": 1}).encode()
    for _ in range(int(rng.integers(4))):
        parts[f"tensor/{rng.choice(['x', 'delta', 'base', 'patterns', 'models', 'probe/rate', 'counts'])}"] = rng.bytes(
            64
        )
    values_changed(parts, rng)


HARMS = (flipped, json_changed, json_raw, header_changed, values_changed, parts_changed, made_up)


def _pick(parts: Parts, rng: np.random.Generator) -> str:
    names = sorted(parts) or [META]
    parts.setdefault(names[0], b"")
    return names[int(rng.integers(len(names)))]


def to_server(all_: Everything, rng: np.random.Generator, counts: Counter[str]) -> None:
    phase, parts, read, _ = all_.replies[int(rng.integers(len(all_.replies)))]
    try:
        read(spoiled(parts, rng))
        counts[f"server, {phase}: taken"] += 1
    except WireError as error:
        assert error.code in CODES and "\n" not in str(error) and len(str(error)) < 500
        counts[f"server, {phase}: refused"] += 1


def to_site(all_: Everything, rng: np.random.Generator, counts: Counter[str]) -> None:
    phase, parts = all_.asked[int(rng.integers(len(all_.asked)))]
    reply = unpack(all_.sites[1].handle(phase if rng.random() < 0.98 else "nonsense", spoiled(parts, rng)))
    said = reply.meta.get("error")
    assert said is None or said in CODES, said
    counts[f"site, {phase}: {'taken' if said is None else 'refused'}"] += 1


def to_frames(all_: Everything, rng: np.random.Generator, counts: Counter[str]) -> None:
    """The worker's socket: counts, names and sizes that are not so."""
    here, there = socket.socketpair()
    with here, there:
        count, length = int(rng.choice([1, 2, 1 << 31])), int(rng.choice([4, 3, 60_000]))
        size = int(rng.choice([5, 50, 1 << 35, 1 << 63]))
        here.sendall(struct.pack("!IH", count, length) + rng.bytes(4) + struct.pack("!Q", size) + rng.bytes(5))
        here.shutdown(socket.SHUT_WR)
        try:
            frames.receive(there)
            counts["frames: taken"] += 1
        except ConnectionError:
            counts["frames: refused"] += 1


def fuzz(messages: int, seed: int = 0) -> tuple[Counter[str], int, int]:
    """Counts by kind, bytes by which memory grew, the largest budget; raises at the first message that does harm."""
    all_, counts = Everything(), Counter[str]()
    rng = np.random.default_rng(seed)
    for _ in range(50):  # what is loaded on first use is no message's
        to_server(all_, rng, counts)
        to_site(all_, rng, counts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(messages):
        (to_frames if i % 50 == 0 else to_site if i % 4 == 0 else to_server)(all_, rng, counts)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    largest = max(budget.memory for _, _, _, budget in all_.replies)
    return counts, grown, largest


def cost(values: int, repeats: int) -> tuple[float, float]:
    """Seconds to open an update of so many numbers, within a budget and as plainly as the libraries do it."""
    update = Update(0, torch.randn(1, values), 10, (3,), (0.5,))
    parts, budget = pack(pack_update(update, {"round": 1})), Budget({"delta": Kind(("F32",), (1, values))})

    def plain() -> None:
        json.loads(parts[META])
        load(parts["tensor/delta"])

    took = {name: [] for name in ("budget", "plain")}  # type: dict[str, list[float]]
    for _ in range(repeats):
        for name, read in (("budget", lambda: unpack(parts, budget)), ("plain", plain)):
            began = time.perf_counter()
            read()
            took[name].append(time.perf_counter() - began)
    return float(np.median(took["budget"])), float(np.median(took["plain"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for values, repeats in ((600, 500), (11_000_000, 15)):
        budget, plain = cost(values, repeats)
        print(f"an update of {values * 4 / 1e6:.3f} MB opens in {1e3 * budget:.3f} ms, plainly in {1e3 * plain:.3f} ms")
    began = time.perf_counter()
    counts, grown, largest = fuzz(args.messages, args.seed)
    for kind, n in sorted(counts.items()):
        print(f"{n:8,}  {kind}")
    print(f"{sum(counts.values()):,} messages in {time.perf_counter() - began:.0f} s, none did harm")
    print(f"memory grew by {grown / 1e6:.1f} MB; the largest message may be {largest / 1e6:.1f} MB by its budget")
    assert grown <= 2 * largest


if __name__ == "__main__":
    main()
