"""Writes the tables and sentences that show the committed results.

`python -m benchmarks.pages` writes those of the README, of the guide and of `results`.
"""

import itertools
import re
from pathlib import Path

import numpy as np

from benchmarks import (
    casting,
    gpu,
    growth,
    need,
    report,
    retries,
)
from benchmarks.compiled import TPU
from benchmarks.systems import PLAIN

CPU = report.RESULTS / "cpu.json"
ROOT = Path(__file__).parents[1]
README, DTYPES = ROOT / "README.md", ROOT / "docs/guide/do-you-need-it.md"
RETRIES = ROOT / "docs/guide/no-step-lost.md"
EXAMPLES = [ROOT / f"examples/{name}/README.md" for name in ("grpo", "language_model")]
RESULTS = [report.RESULTS / name for name in ("casting.md", "retries.md", "steps.md")]
PAGES = [README, *sorted(ROOT.glob("docs/guide/*.md")), *EXAMPLES, *RESULTS]
NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?"


def tables() -> list[str]:
    """Returns all tables of the committed results."""
    return [
        *report.timing_tables(report.load(CPU)),
        *report.compiled_tables(report.load(report.RESULTS / "compiled.json")),
        *(module.table(report.load(module.RESULTS)) for module in (growth, need)),
        *retries.tables(report.load(retries.RESULTS)),
        *casting.tables(report.load(casting.RESULTS)),
        gpu.table(report.load(gpu.RESULTS)),
        gpu.short_table(report.load(gpu.RESULTS)),
    ]


def sentences() -> dict[Path, list[str]]:
    """Returns the sentences that tell committed results, by page."""
    on_gpu = report.load(gpu.RESULTS)
    ours, scaled = (gpu.ratios(on_gpu, way) for way in (gpu.OURS, gpu.SCALED))
    repeated = gpu.ratios(on_gpu, gpu.RETRIES, gpu.SCALED)
    least, highest = min(scaled), max(scaled)
    trainings = [
        systems
        for systems in report.by_workload(report.load(CPU)).values()
        if systems[PLAIN]["column"] and not systems[PLAIN]["given"]
    ]
    most, stored = (
        f"{max(systems[way]['ratio'] for systems in trainings):.2f}"
        for way in ("minimize", "update")
    )
    # Those of the plain step and of a fixed scale are 1.
    rows = report.load(report.RESULTS / "compiled.json")[TPU]["rows"]
    names = "minimize", "update of unscaled", "with_loss_scale, update"
    more = [round(100 * row["ratio"] - 100) for row in rows if row["system"] in names]
    runs = report.load(report.RESULTS / "grpo.json")["runs"].values()
    differences = ([x["mean_difference"] for x in seeds] for seeds in runs)
    _, half, *others = map(np.mean, differences)
    default, as_written = (f"{other / half:.0f} times" for other in others)
    pair = f"{others[1]:.0e} against {half:.0e}".replace("e-0", "e-")
    return {
        README: [f"this step takes {ours[0]:.2f} times as long as float16 by hand"],
        DTYPES: [
            f"bfloat16 differs {as_written} as much as float16: {pair}.",
            f"takes {least:.2f} to {highest:.2f} times as long as a constant scale",
            f"{listed(ours)} times as long as float16 by hand",
            f"Adam's step moves {min(more)} to {max(more)}% more bytes.",
            f"take up to {most} times as long as with plain Optax,",
            f"with `update` up to {stored},",
        ],
        RETRIES: [
            f"takes {listed(repeated)} times as long on a GPU",
        ],
        EXAMPLES[0]: [
            f"**bfloat16 differs {as_written} as much as float16**",
            f"**With XLA's default it is {default}.**",
        ],
    }


def listed(ratios: list[float]) -> str:
    """Writes ratios as a sentence lists them."""
    *others, last = (f"{x:.2f}" for x in ratios)
    return f"{', '.join(others)} and {last}"


def fill(page: str, sentence: str) -> str:
    """Returns a page with the numbers of a sentence, which it has with any numbers."""
    words, numbers = re.split(NUMBER, sentence), re.findall(NUMBER, sentence)
    groups = (r"\s+".join(map(re.escape, text.split(" "))) for text in words)

    def write(match: re.Match[str]) -> str:
        pairs = itertools.zip_longest(match.groups(), numbers, fillvalue="")
        return "".join(itertools.chain.from_iterable(pairs))

    page, count = re.subn(NUMBER.join(f"({group})" for group in groups), write, page)
    if count != 1:
        raise ValueError(f"the page must say once, got {count} times: {sentence}")
    return page


def updated(path: Path) -> str:
    """Returns the text of a page with the committed results."""
    text = report.replace_tables(path.read_text(), tables())
    for sentence in sentences().get(path, []):
        text = fill(text, sentence)
    return text


def main() -> None:
    """Writes all of them."""
    report.parser("benchmarks.pages", __doc__).parse_args()
    CPU.with_suffix(".md").write_text(report.full_report(report.load(CPU)))
    for path in PAGES:
        path.write_text(updated(path))


if __name__ == "__main__":
    main()
