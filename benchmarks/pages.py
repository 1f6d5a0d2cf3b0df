"""Writes the tables that show the committed results.

`python -m benchmarks.pages` writes those of the README, the guide and `results`.
"""

from pathlib import Path

from benchmarks import growth, grpo, guards, language_model, need, report, retries

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "docs/guide/bad-steps.md",
        "docs/guide/costs.md",
        "docs/guide/do-you-need-it.md",
        "docs/guide/float16-or-bfloat16.md",
        "docs/guide/no-step-lost.md",
    )
]


def tables() -> list[str]:
    """Returns all tables of the committed results."""
    cpu, compiled, grown, needed, trained = (
        report.load(report.RESULTS / f"{name}.json")
        for name in ("cpu", "compiled", "growth", "need", "language_model")
    )
    return [
        *report.timing_tables(cpu),
        *report.compiled_tables(compiled),
        report.summary_table(cpu, compiled),
        growth.table(grown),
        need.table(needed),
        language_model.table(trained),
        language_model.flushed_table(trained),
        *retries.tables(report.load(retries.RESULTS)),
        guards.table(report.load(guards.RESULTS)),
        grpo.table(report.load(grpo.RESULTS)),
    ]


def main() -> None:
    """Writes all of them."""
    cpu = report.RESULTS / "cpu.json"
    cpu.with_suffix(".md").write_text(report.full_report(report.load(cpu)))
    for path in PAGES:
        path.write_text(report.replace_tables(path.read_text(), tables()))


if __name__ == "__main__":
    main()
