"""The site has every name, recipe and notebook; `.ci/run docs` builds it."""

import re
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from rules import NAMES
from test_docs import DIAGNOSTICS, PUBLIC

DOCS = ROOT / "docs"
# Pages that the build makes: of notebooks and their list, and of other files of the
# repository.
NOTEBOOKS = {f"notebooks/{path.stem}.md" for path in ROOT.glob("notebooks/*.ipynb")}
MADE = NOTEBOOKS | {"notebooks/index.md", "index.md"}
MADE |= {"changelog.md", "contributing.md"}
RESULTS = ("by_hand", "casting", "guards", "retries", "steps", "tools")
MADE |= {f"benchmarks/{name}.md" for name in RESULTS}
MADE |= {"examples/grpo.md", "examples/language_model.md"}
PAGES = MADE | {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def reachable(entry):
    """Returns the pages that an entry of the navigation leads to."""
    if isinstance(entry, dict):
        entry = list(entry.values())
    if isinstance(entry, list):
        return set().union(*map(reachable, entry))
    pattern = entry if entry.endswith((".md", "*")) else f"{entry}/*"
    return {page for page in PAGES if Path(page).match(pattern)}


def entries(entry):
    if isinstance(entry, dict):
        entry = list(entry.values())
    if isinstance(entry, list):
        return [text for item in entry for text in entries(item)]
    return [entry]


NAVIGATION = yaml.safe_load((DOCS / ".nav.yml").read_text())["nav"]


def test_every_page_is_in_the_navigation():
    assert len(NOTEBOOKS) >= 3
    assert reachable(NAVIGATION) == PAGES


def test_recipes_are_listed_in_the_order_of_the_navigation():
    pages = [entry for entry in entries(NAVIGATION) if entry.startswith("recipes/")]
    links = re.findall(r"\]\((\w+\.md)\)", (DOCS / "recipes/README.md").read_text())
    assert pages == ["recipes/README.md", *(f"recipes/{link}" for link in links)]


@pytest.mark.parametrize("entry", entries(NAVIGATION))
def test_navigation_leads_somewhere(entry):
    assert reachable(entry)


def test_every_public_name_is_in_the_reference_once():
    pages = [path.read_text() for path in DOCS.glob("api/*.md")]
    text = "\n".join(pages)
    found = re.findall(r"^::: optax_lossscale\.((?:diagnostics\.)?\w+)$", text, re.M)
    diagnostics = [f"diagnostics.{name}" for name in DIAGNOSTICS]
    # The build adds the rules by itself.
    names = PUBLIC.keys() - DIAGNOSTICS - NAMES
    assert sorted(found) == sorted([*names, *diagnostics])
