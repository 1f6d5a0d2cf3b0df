"""The page of the committed results."""

from typing import Any

from benchmarks import report
from benchmarks.public import edits
from benchmarks.public.programs import PROGRAMS, Program
from benchmarks.public.training import FLOAT16, FLOAT32

RESULTS = report.RESULTS / "public.json"
PAGE = report.RESULTS / "public.md"


def page(found: dict[str, Any]) -> str:
    """Returns the page.

    Args:
      found: The results, by the name of a program.
    """
    programs = [program for program in PROGRAMS if program.name in found]
    parts = [_start(programs, found), *(_section(x, found[x.name]) for x in programs)]
    return "\n".join(parts)


def _start(programs: list[Program], found: dict[str, Any]) -> str:
    about = found[programs[0].name]
    packages = "jax", "optax", "flax", "equinox", "dm-haiku", "numpyro"
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in packages)
    rows = []
    for program in programs:
        ways = found[program.name]["rows"]
        losses = (f"{ways[way]['last_loss']:.4g}" for way in (FLOAT32, FLOAT16))
        lines = edits.count(edits.parse(program.float16))
        name = f"[{program.name}](#{program.name.lower().replace(' ', '-')})"
        steps, skipped = (str(ways[FLOAT16][key]) for key in ("steps", "skipped"))
        changed = f"-{lines.removed} +{lines.added}"
        first = f"{ways[FLOAT32]['first_loss']:.4g}"
        rows.append([name, program.kind, changed, first, *losses, steps, skipped])
    header = ["program", "model", "lines", "loss at the start", "end, float32"]
    header += ["end, float16", "steps", "skipped"]
    return f"""# Public trainings

{len(programs)} programs that others published, edited to train in float16. Each is trained twice from the same seeds: as it
is, and with its edits.

{report.table(header, rows)}
*Lines* are those that the edits remove and add, besides the import. Two change where the step calls
`jax.value_and_grad`, and a decorator, a second model or an optimizer on several lines adds to them. A trainer that computes
the gradients itself, as SVI, needs most. The losses are means of the first and of the last tenth of the steps. In float16 a
few steps are skipped, until the loss scale fits.

Nothing is downloaded: images are the digits of scikit-learn, and texts the help pages of Python. Batches, some layers and
the number of steps are smaller than published, so that a training takes a minute on a CPU. Both dtypes have that in common.
After so few steps no loss says which dtype is better.

To repeat it, clone the repositories to `FOLDER/owner/name`, and install what the programs import:

```sh
python -m benchmarks.public FOLDER
```

Measured on {about["date"]} with {versions}, on {about["machine"]["device"]}.
"""


def _section(program: Program, found: dict[str, Any]) -> str:
    url = (
        f"https://github.com/{program.repository}/blob/{program.commit}/{program.file}"
    )
    note = f"{program.note}\n\n" if program.note else ""
    measure = (
        f" Recorded is the {program.measure}." if program.measure != "loss" else ""
    )
    diff = program.float16.strip("\n")
    return f"""## {program.name}

{program.kind}: [{program.file}]({url}) of {program.repository}.{measure}

{note}```diff
{diff}
```
"""
