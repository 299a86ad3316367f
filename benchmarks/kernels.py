"""Our kernels against the libraries, one by one and left out of whole rounds in turn, on a GPU: what to use where.

    python benchmarks/kernels.py [--only wgrad norm ...] [--rounds] [--batch 32] [--out kernels.json]

Every line has the time of a call in microseconds, alone and with four at once, as lanes run them, and for kernels the
relative difference from the library. ``--rounds`` also times rounds of FedCGNM on a ResNet-18 with and
without kernels of our own, and with all but one kind. Layers are those of a ResNet-18 on 32x32 images, 21 and 11
samples.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtail.methods import METHODS
from fedtail.simulate.graph import convolution, fused, grouped, groupnorm, pixels, step
from fedtail.simulate.graph.convolution import Plan, Shape
from fedtail.simulate.graph.pixels import Tile
from gpu import federation, simulated

Make = Callable[[], Callable[[], Tensor]]
"""Tensors of its own, and a call that works on them."""
SIZES = (21, 11)
SIDES = {64: 32, 128: 16, 256: 8, 512: 4}
AT_ONCE, CALLS = 4, 12
DEVICE, DTYPE = "cuda", torch.bfloat16


def images(n: int, channels: int, side: int) -> Tensor:
    x = torch.randn(n, channels, side, side, device=DEVICE).to(DTYPE)
    return x.contiguous(memory_format=torch.channels_last)


def library(dy: Tensor, x: Tensor, w: Tensor, stride: int, mask: list[bool]) -> Any:
    pad = [w.shape[-1] // 2] * 2
    return torch.ops.aten.convolution_backward(dy, x, w, None, [stride] * 2, pad, [1, 1], False, [0, 0], 1, mask)


def weight_gradients(inputs: int, outputs: int, width: int, stride: int, plans: list[Plan]) -> dict[str, Make]:
    side, pad, size = SIDES[outputs], width // 2, inputs * outputs * width**2
    shape = Shape((inputs, outputs, width, width, stride, pad, pad), (side * stride, side * stride, side, side))

    def given() -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        torch.manual_seed(0)
        flat = torch.zeros(2, size + 64, device=DEVICE, dtype=DTYPE)
        places = [row[64:].view(outputs, width, width, inputs).permute(0, 3, 1, 2) for row in flat]
        return images(sum(SIZES), inputs, side * stride), images(sum(SIZES), outputs, side), flat, places

    def theirs() -> Callable[[], Tensor]:
        x, dy, flat, places = given()
        w = torch.zeros_like(places[0]).contiguous(memory_format=torch.channels_last)

        def call() -> Tensor:
            for d, v, place in zip(dy.split(SIZES), x.split(SIZES), places, strict=True):
                place.copy_(library(d, v, w, stride, [False, True, False])[1])
            return flat

        return call

    def mine(plan: Plan) -> Callable[[], Tensor]:
        x, dy, flat, places = given()

        def call() -> Tensor:
            convolution.weight_gradients(x, dy, sizes=SIZES, shape=shape, plan=plan, places=places)
            return flat

        return call

    return {"library": theirs} | {_plan_name(p): lambda p=p: mine(p) for p in plans}  # type: ignore[misc]


def _plan_name(p: Plan) -> str:
    return f"{p.outputs}x{p.inputs}, {p.pixels} pixels, {p.stages} stages, {p.programs} programs" + ", row" * p.across


def same_size(channels: int, back: bool, tiles: list[Tile]) -> dict[str, Make]:
    def given() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return images(sum(SIZES), channels, SIDES[channels]), images(channels, channels, 3)

    def theirs() -> Callable[[], Tensor]:
        a, w = given()
        return lambda: library(a, a, w, 1, [True, False, False])[0] if back else F.conv2d(a, w, None, 1, 1)

    def mine(tile: Tile) -> Callable[[], Tensor]:
        a, w = given()
        return lambda: pixels.same_size(a, w, tile, back=back)

    return {"library": theirs} | {str(tuple(t)): lambda t=t: mine(t) for t in tiles}  # type: ignore[misc]


def halved(inputs: int, outputs: int, tiles: list[Tile]) -> dict[str, Make]:
    side = SIDES[outputs]
    shape = Shape((inputs, outputs, 3, 3, 2, 1, 1), (2 * side, 2 * side, side, side))

    def given() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        return images(sum(SIZES), outputs, side), images(sum(SIZES), inputs, 2 * side), images(outputs, inputs, 3)

    def theirs() -> Callable[[], Tensor]:
        dy, x, w = given()
        return lambda: library(dy, x, w, 2, [True, False, False])[0]

    def mine(tile: Tile) -> Callable[[], Tensor]:
        dy, _, w = given()

        def call() -> Tensor:
            with mock.patch.dict(pixels.HALVED, {(inputs, outputs): tile}):
                return pixels.halved_inputs(dy, w, shape)

        return call

    return {"library": theirs} | {str(tuple(t)): lambda t=t: mine(t) for t in tiles}  # type: ignore[misc]


def norms(channels: int, back: bool, blocks: list[tuple[int, int]]) -> dict[str, Make]:
    """``apart``: the shortcut's gradient added by itself."""
    direction = "backward" if back else "forward"

    def make(kind: str, block: tuple[int, int]) -> Callable[[], Tensor]:
        torch.manual_seed(0)
        x, shortcut, dy, more = (images(sum(SIZES), channels, SIDES[channels]) for _ in range(4))
        w = torch.randn(channels, device=DEVICE).to(DTYPE)
        kernel = kind != "plain"

        def forward() -> groupnorm.Saved:
            return groupnorm.norm_forward(x, shortcut, w, w, 32, 1e-5, relu=True, kernel=kernel)[0]

        saved = forward()

        def call() -> Tensor:
            with mock.patch.object(groupnorm, "wanted_block", lambda *_: block):
                if not back:
                    return forward().y
                given = (dy + more, None) if kind == "apart" else (dy, more)
                options = {"relu": True, "residual": True, "kernel": kernel, "more": given[1]}
                return groupnorm.norm_backward(given[0], saved, **options)[0]  # type: ignore[arg-type]

        return call

    now = groupnorm.wanted_block(direction, SIDES[channels] ** 2)
    out: dict[str, Make] = {"plain": lambda: make("plain", now)}
    if back:
        out["apart"] = lambda: make("apart", now)
    return out | {str(b): lambda b=b: make("kernel", b) for b in [now, *blocks]}  # type: ignore[misc]


def momentum_steps(blocks: list[tuple[int, int]]) -> dict[str, Make]:
    size, method = 11_173_962, METHODS.build("fedcgnm")
    hyper = {"beta": 0.9, "delta": 0.0, "lr": 0.01, "weight_decay": 5e-4}

    def make(block: tuple[int, int] | None) -> Callable[[], Tensor]:
        torch.manual_seed(0)
        m, x = torch.randn(2, size, device=DEVICE), torch.randn(size, device=DEVICE)
        shadow, grads = x.to(DTYPE), torch.randn(2, size, device=DEVICE).to(DTYPE)
        values = {k: torch.tensor(v, device=DEVICE) for k, v in hyper.items()}
        compiled = step.update_function(method, DEVICE == "cuda", False)
        local = step.Local(
            params=x,
            rest=x[:0],
            shadow=shadow,
            groups=torch.zeros(10, dtype=torch.int64, device=DEVICE),
            const={},
            state={"momentum": m},
            hyper=values,
        )

        def call() -> Tensor:
            if block is None:
                compiled(local, x, grads)
            else:
                with mock.patch.multiple(step, BLOCK=block[0], AT_ONCE=block[1]):
                    step.momentum_step(x, shadow, m, grads, values)
            return x[:1000]

        return call

    return {"compiled": lambda: make(None)} | {str(b): lambda b=b: make(b) for b in blocks}  # type: ignore[misc]


def cases() -> Iterator[tuple[str, str, dict[str, Make]]]:
    """Kind, title, and ways to do it, the library's or plain one first."""
    for (inputs, outputs, width), plan in convolution.PLANS.items():
        if inputs > convolution.NARROW:
            stride = 2 if width == 3 and inputs != outputs else 1
            rows = [replace(plan, outputs=64, inputs=64, across=True), replace(plan, across=True, stages=1)]
            small = replace(plan, outputs=64, inputs=64)
            plans = [plan, small, *(rows if width == 3 else [])]
            title = f"weight gradients {inputs} to {outputs}, {width}x{width}/{stride}"
            yield "wgrad", title, weight_gradients(inputs, outputs, width, stride, plans)
    for (inputs, outputs), tile in pixels.HALVED.items():
        tiles = [tile, Tile(128, 64, 64), Tile(64, min(inputs, 128), 64), tile._replace(stages=1)]
        yield "halved", f"input gradients {inputs} to {outputs}, 3x3/2", halved(inputs, outputs, tiles)
    for channels in SIDES:
        for back in (False, True):
            tiles = [Tile(128, 64, 64, 4, 1), Tile(128, 64, 64, 4, 3), Tile(64, 64, 64, 4, 1), Tile(64, 64, 64, 4, 4)]
            what = "input gradients" if back else "outputs"
            yield "same", f"{what} {channels}, 3x3", same_size(channels, back, tiles)
            blocks = [(16, 1024), (16, 2048), (32, 2048)]
            yield "norm", f"GroupNorm {channels} {'backward' if back else 'forward'}", norms(channels, back, blocks)
    yield "step", "FedCGNM's step", momentum_steps([(8192, 2048), (4096, 1024), (16384, 2048)])


def microseconds(make: Make) -> tuple[float, float]:
    """Of a call, alone and with others at once, all replayed from recorded graphs."""
    recorded = []
    for _ in range(AT_ONCE):
        call, stream, graph = make(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        call()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            call()
            stream.synchronize()
            graph.capture_begin()
            for _ in range(CALLS):
                call()
            graph.capture_end()
        recorded.append((graph, stream, call))  # which holds the tensors that the graph reads

    def timed(many: int, repeat: int = 5) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeat):
            for graph, stream, _ in recorded[:many]:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / (repeat * CALLS * many) * 1e6

    timed(AT_ONCE)
    return min(timed(1) for _ in range(3)), min(timed(AT_ONCE) for _ in range(3))


@contextmanager
def without(kind: str) -> Iterator[None]:
    """Rounds in which the kernels of a kind are left to the libraries."""
    patches = {
        "weight gradients": lambda: mock.patch.dict(convolution.PLANS, clear=True),
        "halved": lambda: mock.patch.dict(pixels.HALVED, clear=True),
        "same": lambda: mock.patch.dict(pixels.SAME, clear=True),
        "second readers": lambda: mock.patch.object(fused, "_second_readers", lambda *_: {}),
        "step": lambda: mock.patch.object(step, "has_kernel", lambda *_: False),
        "products": lambda: mock.patch.object(grouped, "_is_product", lambda *_: False),
    }
    with patches[kind]():
        yield


KINDS = ("weight gradients", "halved", "same", "second readers", "step", "products")


def rounds(batch: int, shrink: int, width: int) -> dict[str, float]:
    """Images per second."""
    data, out = federation(5, shrink), dict[str, float]()
    ways = [(False, None), (True, None), *((True, kind) for kind in KINDS)]
    for kernels, kind in ways:
        name = ("own" if kernels else "library") if kind is None else f"own but {kind}"
        try:
            with without(kind) if kind else mock.patch.dict({}), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                got, engine = simulated(data, batch, DEVICE, width, kernels=kernels)
            engine.close()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        out[name] = got["images_per_second"]
        said = {str(w.message) for w in caught if "left to" in str(w.message)}
        print(f"{name:34} {out[name]:10,.0f} images/s, repeatable {got['bitwise_repeatable']} {said or ''}", flush=True)
    return out


def main() -> None:
    global DEVICE, DTYPE, SIZES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="kinds: wgrad, halved, same, norm, step")
    parser.add_argument("--rounds", action="store_true")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--shrink", type=int, default=4, help="divide the data of the rounds")
    parser.add_argument("--width", type=int, default=64, help="of the ResNet; smaller only to try the script")
    parser.add_argument("--device", default="cuda", help="cpu with TRITON_INTERPRET=1 compares, without times")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cpu":
        DEVICE, DTYPE, SIZES = "cpu", torch.float32, (2, 1)
    result: dict[str, Any] = {}
    for kind, title, ways in cases():
        if args.only is not None and kind not in args.only:
            continue
        expected: Tensor | None = None
        print(title, flush=True)
        for name, make in ways.items():
            try:
                value = make()().float()
                expected = value if expected is None else expected
                apart = float((value - expected).norm() / expected.norm())
                alone, many = microseconds(make) if DEVICE == "cuda" else (0.0, 0.0)
            except Exception as error:
                print(f"    {name:60} {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            result.setdefault(title, {})[name] = {"alone": alone, "at_once": many, "apart": apart}
            print(f"    {name:60} {alone:7.1f} {many:7.1f}  {apart:.0e}", flush=True)
    if args.rounds:
        result["rounds"] = rounds(args.batch, args.shrink, args.width)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
