"""The map in CONTRIBUTING.md shows the files and the layers that there are."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = CONFIGURATION["tool"]["importlinter"]["contracts"]


def mapped():
    """Returns the modules in the map, in its order."""
    _, text, _ = TEXT[TEXT.index("## Layout") :].split("```", 2)
    modules, folders = [], ["optax_lossscale"]
    for indent, name, slash in re.findall(r"(?m)^( *)(\w+)(?:\.py|(/))", text):
        folders = folders[: 1 + len(indent) // 2]
        modules.append(".".join([*folders, name]))
        folders += [name] if slash else []
    return modules


def test_every_file_is_in_the_map():
    package = ROOT / "optax_lossscale"
    files = [path.relative_to(ROOT).with_suffix("") for path in package.rglob("*.py")]
    names = {".".join(path.parts).removesuffix(".__init__") for path in files}
    names = names - {"optax_lossscale"} | {"optax_lossscale.__init__"}
    assert set(mapped()) == names
    assert len(mapped()) == len(names)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda x: x["name"])
def test_the_map_is_in_the_order_of_the_layers(contract):
    (container,) = contract["containers"]
    modules = mapped()
    places = [
        [modules.index(f"{container}.{name}") for name in re.findall(r"\w+", layer)]
        for layer in contract["layers"]
    ]
    for above, below in itertools.pairwise(places):
        assert max(above) < min(below)
