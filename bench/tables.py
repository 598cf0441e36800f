"""The tables of pages of docs, rendered from recorded lines between their marks. Pure.

<!-- table decode -->           <!-- table goals at amx -->      figures of another machine, by name
...                             ...
<!-- end -->                    <!-- end -->
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

import table
import visual_report
from goals import GOALS, OURS, PEERS, relative_to
from table import Line

Cells = list[Sequence[str]]

MARKED = re.compile(r"(<!-- table (\w+)(?: at (\w+))? -->\n).*?(?=<!-- end -->)", re.DOTALL)
UNTIMED = frozenset({"int8_accuracy", "visual_tokens"})
LINE = 120
MIDDLE_AND_TAIL = ("p50_ms", "p95_ms")
CASES = {
    "repeated": "cached image / text alone",
    "text again": "cached text prefix / text alone",
    "image again": "cached image prompt / new",
}


def fill(
    text: str, lines: Sequence[Line], elsewhere: Mapping[str, Sequence[Line]] | None = None
) -> str:
    """The document with every table rendered from the lines of this machine or of another one.

    Raises:
        KeyError: a mark names a table that is not in `TABLES`, or a machine without lines.
    """

    def table_of(found: re.Match[str]) -> str:
        of = (elsewhere or {})[found[3]] if found[3] else lines
        return f"{found[1]}\n{render(found[2], of)}\n\n"

    return MARKED.sub(table_of, text)


def render(name: str, lines: Sequence[Line]) -> str:
    """One table, with a note if other work disturbed the measurement."""
    bench, make = TABLES[name]
    used = [line for line in lines if line["bench"].partition(".")[0] == bench]
    cells = make(lines)
    if len(cells) < 2:
        return f"Not measured (`{bench}`)."
    text = table.markdown(cells)
    if bench not in UNTIMED and not all(table.is_quiet(line, lines) for line in used):
        text += f"\n\nOther processes used the machine during this measurement (`{bench}`)."
    if name == "goals":
        text += f"\n\n{textwrap.fill(measured_at(lines), LINE, break_on_hyphens=False)}"
    return text


def measured_at(lines: Sequence[Line]) -> str:
    """The commits that were measured, with the benchmarks of each.

    A benchmark's `took` line names its commit; the machine's line names that of all others.
    """
    (others,) = [line.get("commit", "unknown") for line in _of(lines, "machine")] or ["unknown"]
    by_commit: dict[str, list[str]] = {}
    for line in lines:
        bench, _, rest = line["bench"].partition(".")
        if rest == "took" and "commit" in line and line["commit"] != others:
            by_commit.setdefault(line["commit"], []).append(f"`{bench}`")
    named = [f"{', '.join(sorted(names))} at `{commit}`" for commit, names in by_commit.items()]
    return f"Measured at `{others}`" + (f"; {'; '.join(named)}." if named else ".")


def goals(lines: Sequence[Line]) -> Cells:
    """One row per goal, with its verdict."""
    return table.cells(table.rows(lines, GOALS))


def peers(lines: Sequence[Line]) -> Cells:
    """One row per engine; in brackets our speedup over it, with ~ if rounds disagree."""
    heads = {
        "ttft_image_s": "TTFT image, s",
        "ttft_text_s": "TTFT text, s",
        "prefill_s": "prefill, s",
        "decode1_tok_s": "decode 1, tokens/s",
        "decode4_tok_s": "decode 4",
        "decode16_tok_s": "decode 16",
        "trace_s": "trace, s",
    }

    def cell(engine: str, key: str) -> str:
        (figure,) = table.of(PEERS, key, engine=engine)(lines)
        (ours,) = relative_to(engine, key)(lines)
        ahead = ours.value if key.endswith("tok_s") else 1 / ours.value
        sign = "" if ours.is_known else "~"
        return f"{figure.value:.3g}" + f" ({sign}{ahead:.2f})" * (engine != OURS)

    engines = [line["engine"] for line in _of(lines, PEERS)]
    return [
        ("", *heads.values()),
        *((name, *(cell(name, key) for key in heads)) for name in engines),
    ]


def batching(lines: Sequence[Line]) -> Cells:
    """Static and continuous batching."""
    return [
        ("", "tokens/s", "TTFT p50, ms", "p95", "latency p50, ms", "p95"),
        *(
            (
                line["what"],
                *_numbers(
                    line["tokens_per_second"],
                    *(line[kind][p] for kind in ("ttft_ms", "latency_ms") for p in ("p50", "p95")),
                ),
            )
            for line in _of(lines, "batching.trace")
        ),
    ]


def chunks(lines: Sequence[Line]) -> Cells:
    """One row per chunk size of a long prompt."""
    keys = "tokens_of_a_step", "longest_gap_ms", "ttft_of_prompt_ms"
    return [
        ("tokens per step", "longest gap of an answer, ms", "TTFT of the prompt, ms"),
        *(_numbers(*(line[key] for key in keys)) for line in _of(lines, "batching.chunks")),
    ]


def first_token(lines: Sequence[Line]) -> Cells:
    """One row per change to the base request."""
    found = _of(lines, "ttft")
    base = next((line["ms"] for line in found if line["what"] == "new image"), 1.0)

    def cells(line: Line) -> Sequence[str]:
        stages = dict(line["stages"])
        large = [stages.pop(name, 0.0) for name in ("media", "encode", "prefill")]
        share = f"{line['ms'] / base:.2f}"
        times = _numbers(*large, sum(stages.values()))
        return line["what"], *_numbers(line["prompt_tokens"], line["ms"]), share, *times

    stages = "media", "encode", "prefill", "other stages"
    return [("", "prompt tokens", "TTFT, ms", "share of base", *stages), *map(cells, found)]


def split(lines: Sequence[Line]) -> Cells:
    """One row per stage; each role is a process."""
    found = _of(lines, "split_ttft")
    names = dict.fromkeys(name for line in found for name in line["stages"])

    def cells(stage: str) -> Sequence[str]:
        kept = [line["stages"].get(stage, {}) for line in found]
        return f"`{stage}`", *_numbers(*(one.get(p) for one in kept for p in MIDDLE_AND_TAIL))

    heads = [f"{line['kind']}, {p}" for line in found for p in ("p50, ms", "p95, ms")]
    whole = _numbers(*(line["ttft"][p] for line in found for p in MIDDLE_AND_TAIL))
    rows = [("TTFT", *whole)] if found else []
    return [("", *heads), *map(cells, names), *rows]


def decode(lines: Sequence[Line]) -> Cells:
    """One row per batch size: a step, a step with almost no work, and the bytes read."""
    calls = {line["batch"]: line["ms"] for line in _of(lines, "decode.calls")}

    def cells(line: Line) -> Sequence[str]:
        batch = line["batch"]
        times = line["ms"], calls.get(batch)
        shares = f"{line['of_limit']:.2f}", f"{line['int8_ratio']:.2f}"
        read = _numbers(line.get("gb_per_second"), line["read_gb_per_second"])
        return str(batch), *_numbers(*times, line["tokens_per_second"]), shares[0], *read, shares[1]

    heads = "sequences", "step, ms", "without work, ms", "tokens/s", "share of limit"
    more = "GB/s read", "GB/s probed", "int8 weights / bfloat16"
    return [(*heads, *more), *map(cells, _of(lines, "decode"))]


def paged_attention(lines: Sequence[Line]) -> Cells:
    """One row per shape."""
    return [
        ("heads", "sequences x tokens", "GB/s", "share of bandwidth", "bfloat16 / int8 KV"),
        *(
            (
                line["shape"],
                f"{line['sequences']} x {line['tokens']}",
                f"{line['gb_per_second']:g}",
                f"{line['share']:.2f}",
                f"{line['int8_against_bfloat16']:.2f}",
            )
            for line in _of(lines, "paged_attention")
        ),
    ]


def cache(lines: Sequence[Line]) -> Cells:
    """One row per kind of cache hit, one column per model."""
    found = _of(lines, "cache")
    rows = [
        (name, *(f"{line[kind]['ratio']:.2f} ({line[kind]['floor']:.2f})" for line in found))
        for kind, name in CASES.items()
        if found
    ]
    return [("ratio (floor)", *(line["model"] for line in found)), *rows]


def gateway(lines: Sequence[Line]) -> Cells:
    """One row per case: what one gateway serves, and the cores that each process used."""
    names = {
        "requests": "answers of 4 tokens",
        "half": "the same, half the load",
        "stream": "streamed tokens",
    }

    def cells(line: Line) -> Sequence[str]:
        goal = f"{line['goal']:g}, {'met' if line['met'] else 'not met'}" if "goal" in line else ""
        cores = (f"{line[f'{who}_cores']:.2f}" for who in ("gateway", "worker", "client", "other"))
        times = _numbers(line["p50_ms"], line["p95_ms"]) if line["what"] == "half" else ("", "")
        (rate,) = _numbers(line["per_second"])
        each = _numbers(line["gateway_us"], line["per_gateway_core"])
        return names[line["what"]], rate, goal, *each, *cores, *times

    heads = "per second", "goal", "µs of gateway each", "per second and gateway core"
    cores = "cores: gateway", "worker", "clients", "others"
    return [("", *heads, *cores, "p50, ms", "p95, ms"), *map(cells, _of(lines, "gateway_speed"))]


def accuracy(lines: Sequence[Line]) -> Cells:
    """One row per type of weights."""
    return [
        ("", "questions", "right", "float32's tokens"),
        *(
            (
                line["weights"],
                str(line["questions"]),
                f"{line['right']:.3f}",
                f"{line['same_tokens_as_float32']:.3f}",
            )
            for line in _of(lines, "int8_accuracy")
        ),
    ]


TABLES: Mapping[str, tuple[str, Callable[[Sequence[Line]], Cells]]] = {
    "goals": ("goals", goals),
    "peers": (PEERS, peers),
    "batching": ("batching", batching),
    "chunks": ("batching", chunks),
    "first_token": ("ttft", first_token),
    "split": ("split_ttft", split),
    "decode": ("decode", decode),
    "paged_attention": ("paged_attention", paged_attention),
    "cache": ("cache", cache),
    "gateway": ("gateway_speed", gateway),
    "accuracy": ("int8_accuracy", accuracy),
    "visual_tokens": (visual_report.BENCH, visual_report.summary),
    "visual_kinds": (visual_report.BENCH, visual_report.kinds),
    "visual_goals": (visual_report.BENCH, visual_report.goals),
    "visual_speed": (visual_report.SPEED, visual_report.speed),
    "visual_speed_goals": (visual_report.SPEED, visual_report.speed_goals),
    "resolutions": (visual_report.SPEED, visual_report.resolutions),
}
"""By the name in its mark: the benchmark that it shows, and its cells."""


def _of(lines: Sequence[Line], bench: str) -> list[Line]:
    return [line for line in lines if line["bench"] == bench]


def _numbers(*values: float | None) -> tuple[str, ...]:
    """Each with three digits, or all digits before the point."""
    return tuple(
        "" if one is None else f"{one:.3g}" if one < 1000 else f"{one:.0f}" for one in values
    )
