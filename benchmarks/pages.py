"""Writes the tables that show the committed results.

`python -m benchmarks.pages` writes those of the guide and of `results`.
"""

from pathlib import Path

from benchmarks import growth, grpo, guards, language_model, need, report, retries

CPU = report.RESULTS / "cpu.json"
ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/guide/*.md"))


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
    ]


def main() -> None:
    """Writes all of them."""
    report.parser("benchmarks.pages", __doc__).parse_args()
    CPU.with_suffix(".md").write_text(report.full_report(report.load(CPU)))
    for path in PAGES:
        path.write_text(report.replace_tables(path.read_text(), tables()))


if __name__ == "__main__":
    main()
