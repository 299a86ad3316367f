"""What a repository says of the project agrees with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fedtail.version import VERSION

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def project() -> dict[str, object]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def test_the_workflow_runs_the_whole_suite_on_every_python_that_the_package_names() -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"].values()
    named = re.findall(r"Python :: (3\.\d+)", " ".join(map(str, project()["classifiers"])))  # type: ignore[call-overload]
    assert job["strategy"]["matrix"]["python"] == named
    assert project()["requires-python"] == f">={named[0]}"
    assert job["steps"][-1]["run"] == ".ci/run" and "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_citation_names_the_licence_and_the_paper() -> None:
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert about["license"] == project()["license"] == "MIT" and "MIT License" in (ROOT / "LICENSE").read_text()
    assert about["version"] == VERSION, "of the version that is cited"
    assert about["title"] == project()["name"] and len(about["preferred-citation"]["authors"]) == 5


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.stem)
def test_issue_forms_can_be_read_and_links_of_the_security_page_lead_somewhere(form: Path) -> None:
    assert yaml.safe_load(form.read_text())
    for link in re.findall(r"\]\((\S+?)\)", (ROOT / "SECURITY.md").read_text()):
        assert (ROOT / link).is_file(), link
