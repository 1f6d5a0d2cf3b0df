"""Writes the tables and sentences that show the committed results.

`python -m benchmarks.pages` writes those of the README, of the guide and of `results`,
and the page of public trainings.
"""

import datetime
import itertools
import re
from pathlib import Path

import numpy as np

from benchmarks import (
    by_hand,
    casting,
    compiling,
    gpu,
    growth,
    grpo,
    guards,
    language_model,
    need,
    pytorch,
    report,
    retries,
)
from benchmarks.compiled import H100, TPU
from benchmarks.public import page as public
from benchmarks.systems import PLAIN
from optax_lossscale.diagnostics import _compare

CPU = report.RESULTS / "cpu.json"
ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
AUTOCAST, USE = (ROOT / f"docs/guide/{name}.md" for name in ("autocast", "use"))
REPEATING = "minimize, retries=24"
EXAMPLES = [ROOT / f"examples/{name}/README.md" for name in ("grpo", "language_model")]
NAMES = "casting.md", "guards.md", "pytorch.md", "retries.md", "steps.md"
RESULTS = [report.RESULTS / name for name in NAMES]
CASTING, _, PYTORCH, RETRIES, STEPS = RESULTS
PAGES = [README, *sorted(ROOT.glob("docs/guide/*.md")), *EXAMPLES, *RESULTS]
NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?"
STUDIES = growth, need, language_model, guards


def tables() -> list[str]:
    """Returns all tables of the committed results."""
    return [
        *report.timing_tables(report.load(CPU)),
        *report.compiled_tables(report.load(report.RESULTS / "compiled.json")),
        report.compiling_table(report.load(compiling.RESULTS)),
        *(module.table(report.load(module.RESULTS)) for module in STUDIES),
        language_model.flushed_table(report.load(language_model.RESULTS)),
        *retries.tables(report.load(retries.RESULTS)),
        *casting.tables(report.load(casting.RESULTS)),
        *pytorch.tables(report.load(pytorch.RESULTS)),
        gpu.table(report.load(gpu.RESULTS)),
        gpu.short_table(report.load(gpu.RESULTS)),
        gpu.speedups_table(report.load(gpu.RESULTS)),
    ]


def sentences() -> dict[Path, list[str]]:
    """Returns the sentences that tell committed results, by page."""
    on_gpu = report.load(gpu.RESULTS)
    ours, scaled = (gpu.ratios(on_gpu, way) for way in (gpu.OURS, gpu.SCALED))
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
    runs = report.load(grpo.RESULTS)
    _, half, *others = (np.mean(grpo.differences(runs, way)) for way in grpo.WAYS)
    default, as_written = (f"{other / half:.0f} times" for other in others)
    return {
        STEPS: [
            f"takes {least:.2f} to {highest:.2f} times as long as a constant scale",
            f"{listed(ours)} times as long as float16 by hand",
            f"Adam's step moves {min(more)} to {max(more)}% more bytes.",
            f"take up to {most} times as long as with plain Optax,",
            f"with `update` up to {stored},",
        ],
        EXAMPLES[0]: [
            f"**bfloat16 differs {as_written} as much as float16**",
            f"**With XLA's default it is {default}.**",
        ],
    }


def on_a_gpu() -> dict[Path, list[str]]:
    """Returns the sentences on the time and the memory of a step on a GPU."""
    found = report.load(gpu.RESULTS)

    def ratios(way, base, number="ms"):
        return listed(gpu.ratios(found, way, base, number))

    half, brain = (ratios(way, gpu.TF32) for way in (gpu.OURS, gpu.BFLOAT16))
    flax, memory = gpu.ratios(found, gpu.FLAX), "temp_bytes"
    most = max(gpu.ratios(found, gpu.SCALED, number=memory))
    sizes = {row["way"]: row[memory] / 1e6 for row in found[gpu.MLP]["rows"]}
    pairs = (_compare.RETRIES, _compare.MINIMIZE), (gpu.RETRIES, gpu.SCALED)
    cast, cast_by_hand = (ratios(*pair) for pair in pairs)
    more, more_by_hand = (ratios(*pair, memory) for pair in pairs)
    longest = max(gpu.ratios(found, *pairs[0]))
    day = datetime.date.fromisoformat(found[gpu.MLP]["date"])
    return {
        STEPS: [
            f"takes {half} times as long as JAX's default, to bfloat16 {brain} times.",
            f"It needs {sizes[gpu.OURS]:.0f} MB of temporary memory, and "
            f"{sizes[_compare.TF32]:.0f} MB in TF32",
            f"`DynamicScale` {min(flax):.2f} to {max(flax):.2f} times.",
            f"It needs at most {most:.2f} times the memory.",
            f"the three models take up to {longest:.2f} times as long.",
            f"Measured on {day:%-d %B %Y},",
        ],
        USE: [f"On a GPU it is [up to {100 * longest - 100:.0f}% slower]"],
        RETRIES: [
            f"takes {cast} times as long with `autocast`, and {cast_by_hand} times "
            "with casts by hand.",
            f"to {more} times with `autocast`, and {more_by_hand} times by hand.",
        ],
    }


def by_compilers() -> dict[Path, list[str]]:
    """Returns the sentences on bytes, and on the time to compile and to trace."""
    repeating = report.load(retries.RESULTS)
    compiled = report.load(compiling.RESULTS)
    tracing = report.load(casting.RESULTS)["CPU"]["rows"]

    def more(target, number):
        rows = repeating[target]["rows"]
        return max(row["with"][number] / row["without"][number] for row in rows)

    def longest(system):
        parts = (part["rows"] for part in compiled.values())
        return max(part[system]["ratio"] for part in parts if system in part)

    again = *(more(x, "compile_seconds") for x in (TPU, H100)), longest(REPEATING)
    traced = [x["autocast"]["seconds"] / x["float32"]["seconds"] for x in tracing]
    found = report.load(by_hand.RESULTS)
    hand = {name: by_hand.ratios(found[name]["rows"])[:2] for name in by_hand.MODELS}
    usual = sorted(moved for moved, _ in hand.values())[:-2]
    gpt, vit = (hand[name][0] for name in ("GPT-2", "ViT"))
    return {
        STEPS: [
            f"GPT-2 moves {gpt:.2f} times the bytes of float16 by hand",
            f"up to {longest('minimize'):.2f} times as long with `minimize`, "
            f"{longest('update'):.2f} times with `update`, "
            f"{longest('with_loss_scale, update'):.2f} times with `with_loss_scale` "
            f"and {max(again):.2f} times with `retries=24`.",
            f"takes {min(traced):.1f} to {max(traced):.1f} times as long.",
        ],
        RETRIES: [
            f"at most {more(H100, 'bytes'):.2f} times the bytes on a GPU, and "
            f"{more(TPU, 'bytes'):.2f} times on a TPU.",
            f"**Compiling** takes up to {max(again):.2f} times as long",
        ],
        CASTING: [
            f"{len(usual)} of {len(hand)} programs move at most {usual[-1]:.2f} times "
            f"the bytes, GPT-2 {gpt:.2f} and ViT {vit:.2f}.",
        ],
    }


def on_a_cpu() -> dict[Path, list[str]]:
    """Returns the sentences on what was trained and timed on a CPU."""
    found = report.load(retries.RESULTS)
    rows = {(x["interval"], x["retries"]): x for x in found["training"]["rows"]}
    short, long = retries.INTERVALS
    pairs = [(rows[short, x], rows[long, x]) for x in (0, retries.RETRIES)]
    flushed = [a["flushed"] / b["flushed"] for a, b in pairs]
    bits, lost = min(b["bits"] - a["bits"] for a, b in pairs), rows[short, 0]["lost"]
    models = report.load(casting.RESULTS)["models"]["rows"].values()
    errors = [100 * row["autocast"][1] for row in models]
    beside = report.load(pytorch.RESULTS)
    networks = len(beside["rows"])
    close = networks - len(pytorch.groups(beside)[-1])
    return {
        PYTORCH: [f"{networks} networks, each"],
        RETRIES: [
            f"steps take {listed([x['ratio'] for x in found['CPU']['rows']])} times",
            f"the scale {bits:.0f} bits higher, and {min(flushed):.2f} to "
            f"{max(flushed):.2f} times as many gradients become zero.",
            f"it loses {lost:.0f} batches of {retries.STEPS}.",
        ],
        AUTOCAST: [
            f"In [{len(errors)} models](../../benchmarks/results/casting.md) the worst "
            f"gradient differs from float32 by {min(errors):.2f} to {max(errors):.0f}%",
            f"{close} of {networks} networks are at most twice as far from float32:",
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


def sentences_of(path: Path) -> list[str]:
    """Returns all sentences of a page that tell committed results."""
    kinds = sentences(), on_a_gpu(), by_compilers(), on_a_cpu()
    return [sentence for found in kinds for sentence in found.get(path, [])]


def updated(path: Path) -> str:
    """Returns the text of a page with the committed results."""
    text = report.replace_tables(path.read_text(), tables())
    for sentence in sentences_of(path):
        text = fill(text, sentence)
    return text


def main() -> None:
    """Writes all of them."""
    report.parser("benchmarks.pages", __doc__).parse_args()
    for path in PAGES:
        path.write_text(updated(path))
    public.PAGE.write_text(public.page(report.load(public.RESULTS)))


if __name__ == "__main__":
    main()
