"""Writes the tables and sentences that show the committed results.

`python -m benchmarks.pages` writes those of the README, of the guide and of `results`.
"""

import itertools
import re
from pathlib import Path

import numpy as np

from benchmarks import (
    casting,
    growth,
    grpo,
    guards,
    language_model,
    need,
    report,
    retries,
)

CPU = report.RESULTS / "cpu.json"
ROOT = Path(__file__).parents[1]
README, DTYPES = ROOT / "README.md", ROOT / "docs/guide/do-you-need-it.md"
EXAMPLES = [ROOT / f"examples/{name}/README.md" for name in ("grpo", "language_model")]
RESULTS = [report.RESULTS / name for name in ("casting.md", "steps.md")]
PAGES = [README, *sorted(ROOT.glob("docs/guide/*.md")), *EXAMPLES, *RESULTS]
NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?"


def tables() -> list[str]:
    """Returns all tables of the committed results."""
    files = CPU, report.RESULTS / "compiled.json", report.RESULTS / "compiling.json"
    cpu, compiled, compiling = map(report.load, files)
    experiments = growth, need, language_model, guards, grpo
    return [
        *report.timing_tables(cpu),
        *report.compiled_tables(compiled),
        report.compiling_table(compiling),
        report.summary_table(cpu, compiled),
        *(module.table(report.load(module.RESULTS)) for module in experiments),
        language_model.flushed_table(report.load(language_model.RESULTS)),
        *retries.tables(report.load(retries.RESULTS)),
        *casting.tables(report.load(casting.RESULTS)),
    ]


def sentences() -> dict[Path, list[str]]:
    """Returns the sentences that tell committed results, by page."""

    def cells(table):
        return [row.strip("| ").split(" | ")[1:] for row in table.splitlines()[2:]]

    files = CPU, report.RESULTS / "compiled.json"
    rows = cells(report.summary_table(*map(report.load, files)))
    steps = rows[0][:3]
    more = [round(100 * float(ratio) - 100) for row in rows[:3] for ratio in row[-2:]]

    found = report.load(grpo.RESULTS)
    _, half, *others = (np.mean(grpo.differences(found, way)) for way in grpo.WAYS)
    default, as_written = (f"{other / half:.0f} times" for other in others)
    pair = f"{others[1]:.0e} against {half:.0e}".replace("e-0", "e-")
    return {
        README: [
            f"Adam's step moves {min(more)} to {max(more)}% more bytes,",
            f"with `minimize` takes {min(steps)} to {max(steps)} times as long as",
        ],
        DTYPES: [
            f"bfloat16 differs {as_written} as much as float16: {pair}.",
        ],
        EXAMPLES[0]: [
            f"**bfloat16 differs {as_written} as much as float16**",
            f"**With XLA's default it is {default}.**",
        ],
    }


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
