"""The notebooks as they are saved: CI runs them; this reads them."""

import json
import re

import pytest
from helpers import ROOT

NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_and_what_is_installed(path):
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    # On Colab, JAX fits the driver of the GPU: no other is installed.
    (install,) = re.findall(r"%pip .*", "\n".join(sources))
    assert "--no-deps" in install
    assert "--upgrade" not in install
    assert not re.search(r"\bjax\b", install)
    assert any("autocast(" in source for source in sources)
    counts = [c["execution_count"] for c in cells if c["cell_type"] == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    for cell in cells:
        outputs = cell.get("outputs", [])
        assert all(x["output_type"] != "error" for x in outputs)
        assert all(x.get("name") != "stderr" for x in outputs)
        pictures = ["image/png" in x.get("data", {}) for x in outputs]
        assert sum(pictures) == len(cell["metadata"].get("alt", []))
