"""The API reference: a table on top of each page, and links to other libraries."""

import inspect
import pydoc
import re

import optax_lossscale
from optax_lossscale import LossScale

# A class that is shown with all its members is listed with them.
NAME = re.compile(
    r"^::: (\S+)(\n    options:\n      inherited_members: true)?", re.MULTILINE
)
FOLDED = re.compile("<details.*?</details>", re.DOTALL)
JAX_OR_OPTAX = re.compile(r"<code>((?:jax|optax)\.[\w.]+)</code>")
# Where other libraries document the names that ours mention. Their own lists, the
# `inventories` of mkdocstrings, would be downloaded in each build.
ELSEWHERE = {
    "https://docs.jax.dev/en/latest/_autosummary/{}.html": (
        "jax.Array", "jax.checkpoint", "jax.custom_vjp", "jax.grad", "jax.jit",
        "jax.lax.scan", "jax.pmap", "jax.shard_map", "jax.value_and_grad", "jax.vmap",
    ),
    "https://matplotlib.org/stable/api/_as_gen/{}.html": ("matplotlib.axes.Axes",),
    "https://optax.readthedocs.io/en/latest/api/apply_updates.html#{}": (
        "optax.apply_updates",
    ),
    "https://optax.readthedocs.io/en/latest/api/utilities.html#{}": (
        "optax.scale_gradient",
    ),
    "https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html#{}": (
        "optax.MultiSteps",
    ),
    "https://optax.readthedocs.io/en/latest/api/transformations.html#{}": (
        "optax.GradientTransformation", "optax.GradientTransformationExtraArgs",
        "optax.clip",
    ),
}  # fmt: skip


def on_page_markdown(markdown, page, **_):
    """Puts a table of its names, with a line of each docstring, on top of a page."""
    if not page.file.src_uri.startswith("api/"):
        return markdown
    markdown = markdown.replace("::: rules\n", _rules())
    paths = []
    for name, has_members in NAME.findall(markdown):
        members = vars(pydoc.locate(name)) if has_members else ()
        paths += [name, *(f"{name}.{x}" for x in members if x[0] != "_")]
    rows = ["| name | what it is or does |", "|---|---|"]
    # Members with a folded entry of their own are not listed.
    folded = {
        name for text in FOLDED.findall(markdown) for name, _ in NAME.findall(text)
    }
    for path in filter(lambda path: path not in folded, paths):
        line = inspect.getdoc(pydoc.locate(path)).splitlines()[0]
        rows.append(f"| [`{path.rpartition('.')[2]}`][{path}] | {line} |")
    introduction, names = markdown.split("\n::: ", maxsplit=1)
    return "\n".join([introduction, *rows, "", f"::: {names}"])


def _rules():
    """Returns the entries of all rules, with their states, in the order of import."""
    rules = (x for x in vars(optax_lossscale).values() if inspect.isclass(x))
    rules = [x for x in rules if issubclass(x, LossScale) and x is not LossScale]
    rule = (
        "::: optax_lossscale.{0}\n    options:\n      inherited_members: [init, update]"
    )
    state = "::: optax_lossscale.{0}State\n"
    return "\n".join(f"{rule}\n\n{state}".format(x.__name__) for x in rules)


def on_page_content(html, page, **_):
    """Lets code of JAX and Optax link to its documentation, as types do."""
    if not page.file.src_uri.startswith("api/"):
        return html
    link = r'<autoref identifier="\1" optional><code>\1</code></autoref>'
    return JAX_OR_OPTAX.sub(link, html)


def on_env(_, config, **__):
    """Tells where other libraries document their names."""
    for url, names in ELSEWHERE.items():
        for name in names:
            config.plugins["autorefs"].register_url(name, url.format(name))
