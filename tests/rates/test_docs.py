"""The examples in docs/rates.md run, and print what the page says."""

import doctest
import re
from pathlib import Path

from fedtail.rates import RATES, fedhoo

PAGE = Path(__file__).parents[2] / "docs" / "rates.md"


def test_the_examples_run_and_print_what_the_page_says(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(blocks) == 2
    scope: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == re.search(r"print\(search\.rates.*# (.*)", blocks[0]).group(1)
    assert len(scope["result"].rates) == 3


def test_every_strategy_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in RATES)


def test_the_docstring_example_runs() -> None:
    assert doctest.testmod(fedhoo).attempted == 4 and doctest.testmod(fedhoo).failed == 0
