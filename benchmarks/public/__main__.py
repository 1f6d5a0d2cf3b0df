"""Trains the programs: `python -m benchmarks.public FOLDER [PROGRAM ...]`."""

import concurrent.futures
import multiprocessing
import sys
from importlib import metadata
from pathlib import Path

from benchmarks import public, report
from benchmarks.public.page import PAGE, RESULTS, page
from benchmarks.public.programs import PROGRAMS, Program
from benchmarks.public.training import FLOAT16, FLOAT32, WAYS, train

PACKAGES = "equinox", "diffrax", "dm-haiku", "jraph", "numpyro", "gymnax", "distrax"


def measure(folder: Path, program: Program) -> dict[str, dict]:
    """Trains a program in float32 and in float16, each in a process of its own."""
    rows = {}
    for way in WAYS:
        print(f"{program.name}, {way} ...", end=" ", flush=True, file=sys.stderr)
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            rows[way] = pool.submit(train, folder, program, way).result()
        print(rows[way], file=sys.stderr)
    if rows[FLOAT32] == rows[FLOAT16]:
        raise ValueError(f"the edits of {program.name} change no loss")
    return rows


def main() -> None:
    """Trains all programs, or those that are named, and writes the results."""
    names = [program.name for program in PROGRAMS]
    options = report.parser("benchmarks.public", public.__doc__, "FOLDER [PROGRAM ...]")
    text = "Clones of the repositories, FOLDER/owner/name."
    options.add_argument("folder", type=Path, metavar="FOLDER", help=text)
    text = f"Train these programs: {', '.join(names)} (default: all)."
    options.add_argument(
        "programs", nargs="*", choices=[*names, []], metavar="PROGRAM", help=text
    )
    arguments = options.parse_args()
    for program in PROGRAMS:
        if program.name in (arguments.programs or names):
            rows = measure(arguments.folder, program)
            about = report.about()
            about["versions"] |= {name: metadata.version(name) for name in PACKAGES}
            found = report.load(RESULTS) | {program.name: {**about, "rows": rows}}
            report.save(RESULTS, found)
            PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
