"""The lists of the site. `.ci/run docs` builds it: with every page, and every name."""

import collections
import re

from helpers import RECIPES, ROOT

DOCS = ROOT / "docs"
HIDDEN = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"```.*?```", re.DOTALL)


def words(path):
    """Returns the words of a page, without what its readers do not see."""
    return len(HIDDEN.sub("", path.read_text()).split())


def test_a_person_can_read_the_readme_to_the_end():
    readme = ROOT / "README.md"
    assert len(CODE.sub("", readme.read_text()).split()) <= 450
    assert words(readme) <= 650


def test_recipes_are_listed_in_the_order_of_the_navigation():
    pages = re.findall(r"- recipes/(\w+\.md)", (DOCS / ".nav.yml").read_text())
    links = re.findall(r"\]\((\w+\.md)\)", (RECIPES / "README.md").read_text())
    assert pages == ["README.md", *links]


def test_no_public_name_is_in_the_reference_twice():
    text = "\n".join(path.read_text() for path in DOCS.glob("api/*.md"))
    names = re.findall(r"^::: optax_lossscale\.([\w.]+)$", text, re.M)
    assert [x for x, n in collections.Counter(names).items() if n > 1] == []
