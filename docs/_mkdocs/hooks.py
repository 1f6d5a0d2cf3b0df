"""What the site adds to the pages: texts from elsewhere, links, pictures, descriptions.

The README, the changelog and the notebooks are written once, and their links are those
of the repository. Here they become links of the site; what is not on the site is linked
on GitHub. `reference.py` has the rest, for the API reference.
"""

import itertools
import posixpath
import re
import textwrap
from html import escape, unescape
from pathlib import Path

import nbformat
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

ROOT = Path(__file__).parents[2]
# Where in the site the files of the repository are that are not below docs.
FILES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/results/casting.md": "benchmarks/casting.md",
    "benchmarks/results/by_hand.md": "benchmarks/by_hand.md",
    "benchmarks/results/guards.md": "benchmarks/guards.md",
    "benchmarks/results/public.md": "benchmarks/public.md",
    "benchmarks/results/pytorch.md": "benchmarks/pytorch.md",
    "benchmarks/results/retries.md": "benchmarks/retries.md",
    "benchmarks/results/steps.md": "benchmarks/steps.md",
    "benchmarks/results/tools.md": "benchmarks/tools.md",
    "examples/grpo/README.md": "examples/grpo.md",
    "examples/language_model/README.md": "examples/language_model.md",
}
FILES |= {
    f"benchmarks/results/{path.name}": f"benchmarks/{path.name}"
    for path in ROOT.glob("benchmarks/results/*.png")
}
SOURCES = {uri: path for path, uri in FILES.items()}
PAGES = {
    **FILES,
    "docs/recipes": "recipes/README.md",
    "examples/grpo": "examples/grpo.md",
    "examples/language_model": "examples/language_model.md",
    "notebooks": "notebooks/index.md",
}
# What the search shows before other pages that have the same words.
BOOSTS = {
    "guide/coming-from-another-loss-scaler.md": 3,
    "guide/troubleshooting.md": 2,
    "recipes/accumulation.md": 2,
    "recipes/checkpoints.md": 2,
    "recipes/per_example_clipping.md": 0.5,
}
# What people type, and a page says in other words.
WORDS = {
    "guide/autocast.md": ["inference", "layer in float32"],
    "guide/coming-from-another-loss-scaler.md": ["Attempting to unscale FP16"],
    "guide/do-you-need-it.md": ["TF32"],
    "guide/many-devices.md": ["multi-GPU"],
    "guide/troubleshooting.md": [
        "overflow",
        "scale keeps dropping",
        "gradient norm",
        "diverges",
    ],
    "guide/use.md": ["BatchNorm", "clip_by_global_norm", "retries=24"],
    "recipes/accumulation.md": ["add gradients up"],
    "recipes/lora.md": ["freeze layers"],
    "recipes/optax.md": ["several optimizers"],
    "stability.md": ["pin a commit"],
}
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(#[^)\s]*)?\)")
# What a recipe asserts of itself, for the tests.
CHECK = re.compile(r"^<!-- check\n.*?^-->$", re.DOTALL | re.MULTILINE)
# Images on other hosts, from which the site loads nothing. Those of the README go.
BADGES = re.compile(r"^\[!\[.*\n", re.MULTILINE)
BADGE = re.compile(r"^\[!\[(.*?)\]\(.*?\)\](\(.*?\))", re.MULTILINE)
# How the README shows a picture for each color scheme.
PICTURE = re.compile(
    r'<picture>.*?<img src="(.*?)" alt="(.*?)".*?</picture>', re.DOTALL
)
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!\w+:)([^)\s]+)\.png\)")
PICTURE_OF_CELL = re.compile(r"!\[png\]")
# The home page shows these parts of the README: the start, beside it the benefits,
# and the rest. A whole script is folded.
PARTS = re.compile(r"^## (?=Benefits|Quickstart)", re.MULTILINE)
SCRIPT = re.compile(
    r"^The script, `(.*?)`(.*?):\n\n(```python.*?```\n\n```.*?```)", re.M | re.S
)
ITSELF = re.compile(r"^\[Read the documentation\]\(.*?\)\. ", re.MULTILINE)
# The sections of libraries of the quickstart are tabs, each with a whole script.
QUICKSTART = "guide/quickstart.md"
SECTION = re.compile(r"^### ([^\n]*)\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
CELL = re.compile(r"<(t[hd])>(.*?)</t[hd]>", re.DOTALL)
# The first paragraph of a page, unless it begins with a link or a picture.
PARAGRAPH = re.compile(r"<p>(?!<a|<img)(.*?)</p>", re.DOTALL)
TAB = re.compile(r'<input\b[^>]* id="([^"]+)"')
TAG = re.compile(r"<.*?>", re.DOTALL)
LONG = 25  # characters: a cell in which a text wraps
NUMBER = re.compile(r"\u2013|-?[\d.,]+( to [\d.]+|%|x| GB)?")
VERSION = re.compile(r"^## \[(.*)\] - (.*)$", re.MULTILINE)


def on_config(config):
    """Shows the version that the pages describe, and whether it is released."""
    number, date = VERSION.search((ROOT / "CHANGELOG.md").read_text()).groups()
    config.extra["version_of_package"] = f"{number}, {date}"


def on_files(files, config):
    """Adds pages from elsewhere, and notebooks with their outputs and their list."""
    for path, uri in FILES.items():
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, uri, content=content))
    texts = {}
    for path in sorted(ROOT.glob("notebooks/*.ipynb"), key=_quickstart_first):
        stem = path.stem
        texts[stem], pictures = _notebook(path, config)
        for name, content in {f"{stem}.md": texts[stem], **pictures}.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    content = _list("Notebooks", texts)
    files.append(File.generated(config, "notebooks/index.md", content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Points links at the site, or else at GitHub, where the page can be edited."""
    uri = page.file.src_uri
    markdown = PICTURE.sub(r"![\2](\1)", CHECK.sub("", markdown))
    if uri in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[uri]}
    page.meta["tags"] = WORDS.get(uri, [])
    if uri == FILES["README.md"]:
        page.meta["hide"] = ["navigation", "toc"]
        markdown = _home(BADGES.sub("", markdown))
    if uri == QUICKSTART:
        markdown = SECTION.sub(_as_tab, markdown)
    is_notebook = uri.startswith("notebooks/")
    source = SOURCES.get(uri, uri if is_notebook else f"docs/{uri}")
    if (ROOT / source).exists():
        page.edit_url = f"{config.repo_url}/edit/main/{source}"
    markdown = BADGE.sub(r"[\1]\2.", markdown)
    markdown = IMAGE.sub(lambda match: _for_both_schemes(match, source), markdown)
    return _linked(markdown, source, uri, f"{config.repo_url}/blob/main")


def on_page_content(html, page, **_):
    """Aligns the columns of numbers, and describes the page by its first paragraph."""
    # Tabs are made after MkDocs has collected the anchors.
    page.present_anchor_ids.update(TAB.findall(html))
    if paragraph := PARAGRAPH.search(html):
        text = unescape(TAG.sub("", paragraph[1].replace("<sup>", "^")))
        page.meta["description"] = escape(" ".join(text.split()))
    return TABLE.sub(lambda match: _with_numbers(match[0]), html)


def _as_tab(section):
    """Makes a section a tab, with the anchor that the heading would have."""
    return f'=== "{section[1]}"\n{textwrap.indent(section[2], " " * 4)}'


def _home(markdown):
    """Puts what one gains beside the start, and folds the script."""
    markdown = ITSELF.sub("", markdown)
    folded = r"<details markdown>\n<summary>The script, <code>\1</code>\2</summary>"
    folded += r"\n\n\3\n\n</details>"
    title, _, text = SCRIPT.sub(folded, markdown).partition("\n\n")
    start, gains, rest = PARTS.split(text)
    columns = zip(
        ("start", "gains", "rest"), (start, f"## {gains}", f"## {rest}"), strict=True
    )
    made = (f'<div class="{name}" markdown>\n\n{x}\n</div>' for name, x in columns)
    return f'{title}\n\n<div class="home" markdown>\n\n{"".join(made)}\n\n</div>\n'


def _for_both_schemes(match, source):
    """Shows X-dark.png, where there is one, in place of X.png in the dark."""
    alt, path = match.groups()
    if not (ROOT / posixpath.dirname(source) / f"{path}-dark.png").exists():
        return match[0]
    return f"![{alt}]({path}.png#only-light)\n![{alt}]({path}-dark.png#only-dark)"


def _with_numbers(table):
    """Marks the columns of numbers of a table, and names the column in each cell.

    On small screens the cells of a row are shown one below the other, if they hold long
    texts, or if they are many and the rows few.
    """
    rows = [[cell for _, cell in CELL.findall(row)] for row in ROW.findall(table)]
    columns = list(zip(*rows, strict=True))
    classes = [
        ' class="number"' * all(not x or NUMBER.fullmatch(x) for x in column[1:])
        for column in columns
    ]
    labels = [f' data-label="{escape(unescape(TAG.sub("", x[0])))}"' for x in columns]
    marks = itertools.cycle(map("".join, zip(classes, labels, strict=True)))
    first, *rest = (max(len(TAG.sub("", x)) for x in column) for column in columns)
    is_long = first > 2 * LONG or (len(columns) > 2 and max(rest) > LONG)
    if is_long or (len(columns) > 5 and len(rows) <= 5):
        table = table.replace("<table>", "<table data-stacked>")
    return CELL.sub(lambda x: f"<{x[1]}{next(marks)}>{x[2]}</{x[1]}>", table)


def _linked(markdown, source, uri, on_github):
    """Makes links of the file `source` in the repository links of a page `uri`."""

    def relative(target):
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    def replace(match):
        target, anchor = match[1], match[2] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (target and (ROOT / path).exists()):
            return match[0]
        if path in PAGES:
            return f"]({relative(PAGES[path])}{anchor})"
        if path.startswith("notebooks/") and path.endswith(".ipynb"):
            return f"]({relative(path.removesuffix('ipynb') + 'md')}{anchor})"
        if path.startswith("docs/"):
            return f"]({relative(path.removeprefix('docs/'))}{anchor})"
        return f"]({on_github}/{path}{anchor})"

    return LINK.sub(replace, markdown)


def _quickstart_first(path):
    return path.stem != "quickstart", path.stem


def _notebook(path, config):
    """Returns a notebook as Markdown, and its pictures by name. Nothing is run."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [part for cell in notebook.cells for part in _folded(cell)]
    # What a cell prints is saved in pieces.
    exporter = MarkdownExporter(preprocessors=[CoalesceStreamsPreprocessor])
    markdown, resources = exporter.from_notebook_node(
        notebook, {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    )
    # Each cell says in words what its pictures show.
    cells = (cell.metadata.get("alt", ()) for cell in notebook.cells)
    alt = itertools.chain.from_iterable(cells)
    markdown = PICTURE_OF_CELL.sub(lambda _: f"![{next(alt)}]", markdown)
    link = f"{config.repo_url}/blob/main/notebooks/{path.name}"
    return f"{markdown}\n[This page is a notebook]({link}).\n", resources["outputs"]


def _folded(cell):
    """Returns a cell, folded under its title if Jupyter and Colab hide its code."""
    if not cell.metadata.get("jupyter", {}).get("source_hidden"):
        return [cell]
    title, _, code = cell.source.partition("\n")
    cell.source, title = code, title.removeprefix("# @title ")
    text = f"<details markdown>\n<summary>{title}</summary>", "</details>"
    before, after = map(nbformat.v4.new_markdown_cell, text)
    return [before, cell, after]


def _list(title, pages):
    """Returns a page that lists pages, each with its first two paragraphs."""
    entries = [
        # The search finds the pages themselves.
        "---\nsearch: {exclude: true}\n---",
        f"# {title}",
        "Read them here, or open them in Colab to run and change them.",
    ]
    for stem, text in pages.items():
        heading, *paragraphs = re.split(r"\n\s*\n", text.strip())
        entries += [f"## [{heading.lstrip('# ')}]({stem}.md)", *paragraphs[:2]]
    return "\n\n".join(entries)
