"""Run the notebooks and store what their cells show, so that a code host shows it too: ``python notebooks/execute.py``.

Without Jupyter: text, HTML tables and PNG figures are all that the notebooks show.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

FOLDER = Path(__file__).parent


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Execute a cell and return its outputs: what it printed, and the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_png_"):
            data = {"image/png": base64.b64encode(small(value._repr_png_())).decode(), "text/plain": ["<figure>"]}
        elif hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


def small(png: bytes) -> bytes:
    """Return a picture with few colours, which is all that a figure has."""
    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(48).save(out, format="png", optimize=True)
    return out.getvalue()


def run_notebook(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the outputs of every code cell, in order."""
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [run_cell("".join(cell["source"]), names) for cell in cells]


def main() -> None:
    """Store the outputs of all notebooks."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, (cell, outputs) in enumerate(zip(cells, run_notebook(notebook), strict=True), start=1):
            for output in outputs:
                if "execution_count" in output:
                    output["execution_count"] = number
            cell |= {"outputs": outputs, "execution_count": number}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
