"""Measures what loss scaling costs on the available device.

Each system runs in turns with a plain Optax step. The result is the median of the
ratios of their times. Writes JSON.
"""

from pathlib import Path

import jax
from rich.progress import track

from benchmarks import report
from benchmarks.measure import measure
from benchmarks.workloads import make_workloads


def main() -> None:
    """Runs the benchmarks."""
    platform = jax.default_backend()
    parser = report.parser("benchmarks", __doc__)
    text = "Measure small workloads alone, in under 2 minutes."
    parser.add_argument("--quick", action="store_true", help=text)
    for kind in ("workload", "system"):
        text = f"Measure only {kind}s whose name contains this."
        parser.add_argument(f"--{kind}", default="", metavar="NAME", help=text)
    out = Path("benchmark_results")
    text = f"Write the results to this folder (default: {out})."
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help=text)
    options = parser.parse_args()
    workloads = [
        workload
        for workload in make_workloads(options.quick, accelerator=platform != "cpu")
        if options.workload in workload.name
    ]
    if not workloads:
        parser.error(f"no workload has a name that contains {options.workload!r}")
    seconds = 0.1 if options.quick else 1.0
    results = {**report.about(), "rows": []}
    path = options.out / f"{platform}.json"
    for workload in workloads:
        rows = measure(workload, seconds, options.system)
        results["rows"] += track(rows, workload.name, len(workload.systems()))
        report.save(path, results)
    print("\n".join(report.timing_tables(results)))
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
