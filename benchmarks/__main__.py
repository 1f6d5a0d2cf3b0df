"""Measures what loss scaling costs on the available device.

Each system runs in turns with a plain Optax step. The result is the median of the
ratios of their times. Writes JSON, a Markdown table per workload, and a plot. The last
workloads, "startup" and "trace_numerics", have their own files.
"""

import argparse
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import Progress

from benchmarks import report, startup, trace
from benchmarks.measure import measure
from benchmarks.workloads import make_workloads


def main() -> None:
    """Runs the benchmarks."""
    platform = jax.default_backend()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="only small workloads, in under 2 minutes"
    )
    parser.add_argument(
        "--workload", default="", help="only workloads whose name contains this"
    )
    parser.add_argument(
        "--system", default="", help="only systems whose name contains this"
    )
    parser.add_argument("--seconds", type=float, help="the seconds that each pair runs")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmark_results"),
        help="the directory to write to",
    )
    options = parser.parse_args()
    workloads = [
        workload
        for workload in make_workloads(options.quick, accelerator=platform != "cpu")
        if options.workload in workload.name
    ]
    others = [x for x in (startup, trace) if options.workload in x.NAME]
    if not workloads and not others:
        parser.error(f"no workload has a name that contains {options.workload!r}")
    seconds = options.seconds or (0.1 if options.quick else 1.0)
    results = {**report.about(), "rows": []}
    stem = options.out / platform
    with Progress(console=Console(stderr=True)) as progress:
        for workload in workloads:
            rows = measure(workload, seconds, options.system)
            rows = progress.track(
                rows, len(workload.systems()), description=workload.name
            )
            results["rows"] += rows
            report.save(stem.with_suffix(".json"), results)
    if workloads:
        report.write(results, stem)
        print("\n".join(report.timing_tables(results)))
        print(f"Wrote {stem}.json, .md and .png")
    for other in others:
        stem = options.out / f"{platform}_{other.NAME}"
        found = {**report.about(), "rows": []}
        for row in other.rows(quick=options.quick):
            found["rows"].append(row)
            report.save(stem.with_suffix(".json"), found)
        stem.with_suffix(".md").write_text(page := other.full_report(found))
        print(page)
        print(f"Wrote {stem}.json and .md")


if __name__ == "__main__":
    main()
