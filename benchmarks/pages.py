"""Writes the tables and figures that show the committed results.

`python -m benchmarks.pages` writes those of the README, the guide and `results`.
"""

from benchmarks import report, startup, trace
from benchmarks.growth import page


def main() -> None:
    """Writes all of them."""
    cpu = report.RESULTS / "cpu"
    report.write(report.load(cpu.with_suffix(".json")), cpu)
    for path in report.PAGES:
        path.write_text(report.refresh(path.read_text()))
    for part in (startup, trace):
        path = report.RESULTS / f"cpu_{part.NAME}.md"
        path.write_text(part.full_report(report.load(path.with_suffix(".json"))))
    page.write(report.load(page.RESULTS))


if __name__ == "__main__":
    main()
