"""Checks the built site: complete, and it asks no other host for anything.

Run by `.ci/run docs`, as `python .ci/check_site.py SITE`.
"""

import inspect
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import optax_lossscale
from optax_lossscale import diagnostics

ROOT = Path(__file__).parents[1]
# What a browser loads by itself, unlike the target of a link.
LOADED = {"script", "img", "source", "iframe", "link"}


class Page(HTMLParser):
    """The names that a page defines, what it loads, and what it links to."""

    def __init__(self, text):
        super().__init__()
        self.names, self.loaded, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.names += filter(None, [attrs.get("id")])
        address = attrs.get("src") or attrs.get("href")
        if address and not address.startswith("data:"):
            is_loaded = tag in LOADED and attrs.get("rel") != "canonical"
            (self.loaded if is_loaded else self.links).append(address)


def expected_names():
    """Yields every public name, and every public method and property of a class."""
    for module in (optax_lossscale, diagnostics):
        for name, public in vars(module).items():
            if name.startswith("_") or inspect.ismodule(public):
                continue
            yield (full := f"{module.__name__}.{name}")
            if not inspect.isclass(public):
                continue
            for cls in public.__mro__:
                own = cls.__module__.startswith("optax_lossscale")
                # What comes from a public base is documented there.
                if own and (cls is public or cls.__name__ not in vars(module)):
                    for attribute, value in vars(cls).items():
                        if attribute[0] != "_" and is_method(value):
                            yield f"{full}.{attribute}"


def is_method(value):
    value = getattr(value, "__func__", value)
    return inspect.isfunction(value) or isinstance(value, property)


def errors(site):
    files = {p.relative_to(site).as_posix(): p for p in site.rglob("*") if p.is_file()}
    pages = {k: Page(v.read_text()) for k, v in files.items() if k.endswith(".html")}
    for name, page in pages.items():
        here = "http://site/" + name.removesuffix("index.html")
        for address in page.loaded + page.links:
            url = urlsplit(urljoin(here, address))
            if url.netloc != "site":
                if address in page.loaded:
                    yield f"{name} loads {address}"
                continue
            target = unquote(url.path).lstrip("/")
            if target.endswith("/") or not target:
                target += "index.html"
            place = unquote(url.fragment)
            if target not in files:
                yield f"{name} links to {address}, which is not there"
            elif place and place not in pages[target].names:
                yield f"{name} links to {address}, which has no such place"
    for name, file in files.items():
        if name.endswith(".css"):
            for address in re.findall(r"url\(['\"]?(https?:[^)]*)", file.read_text()):
                yield f"{name} loads {address}"
    yield from missing(pages)


def missing(pages):
    documented = [name for page in pages.values() for name in page.names]
    for name in dict.fromkeys(expected_names()):
        if (times := documented.count(name)) != 1:
            yield f"{name} is documented {times} times"
    home = {urljoin("/", link) for link in pages["index.html"].links}
    for folder, pattern in {"docs/recipes": "*.md", "notebooks": "*.ipynb"}.items():
        for path in ROOT.glob(f"{folder}/{pattern}"):
            if (address := f"/{path.parent.name}/{path.stem}/") not in home:
                yield f"{address} is not in the navigation"


if __name__ == "__main__":
    found = list(errors(Path(sys.argv[1])))
    print("\n".join(found) or "The site is complete.")
    sys.exit(bool(found))
