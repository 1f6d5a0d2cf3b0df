"""Versions, dates and addresses are the same wherever they are written."""

import datetime
import re
import subprocess
import tomllib

import pytest
import yaml
from helpers import ROOT

import optax_lossscale

VERSION = optax_lossscale.__version__
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESSES = PROJECT["urls"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def read(name):
    return (ROOT / name).read_text()


def released():
    """Returns the date of this version in the changelog."""
    pattern = rf"(?m)^## \[{re.escape(VERSION)}\] - (\d{{4}}-\d\d-\d\d)$"
    return datetime.date.fromisoformat(re.search(pattern, read("CHANGELOG.md"))[1])


def test_the_changelog_starts_with_this_version_or_with_what_comes_next():
    versions = re.findall(r"(?m)^## \[(.*?)\]", read("CHANGELOG.md"))
    assert next(name for name in versions if name != "Unreleased") == VERSION
    assert versions.index(VERSION) <= 1


def test_the_citation_is_of_this_version():
    assert CITATION["version"] == VERSION
    assert CITATION["date-released"] == released()
    assert f"version = {{{VERSION}}}," in read("docs/citing.md")
    assert f"year = {{{released().year}}}," in read("docs/citing.md")


def test_the_readme_is_of_this_version():
    assert f"version {VERSION}" in read("README.md")


def test_supported_versions_are_those_of_the_package():
    rows = re.findall(r"(?m)^\| (\w+) \| ([\d.]+) \|", read("docs/stability.md"))
    floors = dict(text.split(">=") for text in PROJECT["dependencies"])
    assert {name.lower(): floor for name, floor in rows} == floors | {
        "python": PROJECT["requires-python"].removeprefix(">=")
    }


def test_addresses_are_those_of_pyproject():
    repository, site = ADDRESSES["Repository"], ADDRESSES["Documentation"]
    mkdocs = read("mkdocs.yml")
    assert f"repo_url: {repository}\n" in mkdocs
    assert f"site_url: {site}\n" in mkdocs
    assert (CITATION["repository-code"], CITATION["url"]) == (repository, site)
    assert all(url.startswith((repository, site)) for url in ADDRESSES.values())
    command = [
        "git",
        "grep",
        "-hoIE",
        r"https?://[^ )>\"'`]*optax[-_]lossscale[^ )>\"'`]*",
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("no git checkout")
    # A test's pattern, above, is no address.
    for url in {url for url in found.stdout.split() if "[" not in url}:
        assert url.startswith((repository, site.rstrip("/"))), url


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_their_actions_and_run_stages(path):
    text = path.read_text()
    for action in re.findall(r"uses: (.*)", text):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action)
    stages = set(re.findall(r"(?m)^(\w+)\(\) \{$", read(".ci/run")))
    assert "wheel" in stages
    commands = re.findall(r"run: \.ci/run (\w+)$", text, re.MULTILINE)
    assert set(commands) <= stages
    assert commands or "matrix.stages" in text
