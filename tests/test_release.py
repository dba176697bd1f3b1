"""What a release states about itself: one version everywhere, and a changelog that has it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import vmem_jax

ROOT = Path(__file__).parent.parent
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cuda = tomllib.loads((ROOT / "cuda13/pyproject.toml").read_text())["project"]
    assert cuda["version"] == project["version"]
    assert f"{project['name']}=={project['version']}" in cuda["dependencies"]
    citation = (ROOT / "CITATION.cff").read_text()
    released = re.search(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", CHANGELOG, re.M)
    assert vmem_jax.__version__ == project["version"] == released[1]
    assert f"\nversion: {released[1]}\n" in citation
    assert f'\ndate-released: "{released[2]}"\n' in citation


def test_the_changelog_keeps_its_form():
    headings = re.findall(r"^##+ .*$", CHANGELOG, re.M)
    assert headings[0] == "## Unreleased"
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for heading in headings[1:]:
        assert re.fullmatch(r"## \d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading) or heading[4:] in kinds


def test_the_citation_is_valid():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= {*citation}  # what the format demands
    assert all(author["name"] for author in citation["authors"])
