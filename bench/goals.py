"""The goals of speed, on two cores: which figure of which benchmark answers which.

make bench ARGS=--table      the table of what was measured last, nothing measured
"""

from __future__ import annotations

from table import Figure, Goal, most, of, ratio, together, typical

OURS, PEERS = "triptych", "peers"
SHARED = "shared-memory / memcpy"


def ahead_of(engine: str, what: str) -> Figure:
    """Ours over a peer's, of `make bench-peers`."""
    ours, theirs = (of(PEERS, "per_round", what, engine=name) for name in (OURS, engine))
    return typical(ratio(ours, theirs))


GOALS = (
    most(
        "mixed trace / `generate()`",
        "mixed_trace",
        typical(of("mixed_trace", "ratio_per_round")),
        0.45,
    ),
    most("mixed trace / OpenVINO bf16", PEERS, ahead_of("openvino", "trace_s"), None, 0.95),
    Goal("decode, of the limit, batch 1", "decode", of("decode", "of_limit", batch=1), 0.75, 0.85),
    Goal("decode, of the limit, batch 4", "decode", of("decode", "of_limit", batch=4), 0.60, 0.75),
    Goal(
        "decode, of the limit, batch 16", "decode", of("decode", "of_limit", batch=16), 0.65, 0.75
    ),
    Goal("decode / llama.cpp, batch 1", PEERS, ahead_of("llama.cpp", "decode1_tok_s"), 1.0, 1.15),
    Goal("decode / OpenVINO, batch 4", PEERS, ahead_of("openvino", "decode4_tok_s"), 1.0, 1.15),
    Goal("decode / OpenVINO, batch 16", PEERS, ahead_of("openvino", "decode16_tok_s"), 1.0, 1.15),
    *(
        Goal(
            f"paged attention, of bandwidth, {shape}",
            "paged_attention",
            of("paged_attention", "share", shape=shape),
            least,
            aim,
        )
        for shape, least, aim in (
            ("MHA 32/32", 0.70, 0.85),
            ("GQA-4 8/2", 0.55, 0.70),
            ("GQA-8 64/8", 0.40, 0.50),
        )
    ),
    Goal("prefill of 575 tokens, of peak", "prefill", of("prefill.text", "of_limit"), 0.75, 0.88),
    Goal("vision encode, of peak", "prefill", of("prefill.encode", "of_limit"), 0.80, 0.90),
    Goal(
        "attention of a picture / SDPA",
        "attention",
        of("attention", "against_sdpa", shape="ViT 1024 x 12 x 64"),
        None,
        2.0,
    ),
    most(
        "TTFT, new picture / (operations at peak)",
        "ttft",
        of("ttft", "against_limit", what="new picture"),
        1.25,
        1.15,
    ),
    most(
        "TTFT, picture seen before / text alone",
        "ttft",
        of("ttft", "against_text", what="picture seen before"),
        1.05,
    ),
    most(
        "JPEG 4000x3000 to patches / Pillow",
        "image",
        of("image", "ratio", what="JPEG 4000x3000 to 504x364"),
        0.35,
        0.30,
    ),
    most("its mean difference", "image", of("image", "mean_difference"), 1e-3),
    Goal(
        "hand-over between pods / raw TCP",
        "transfer",
        of("transfer", "stream / tcp", "ratio"),
        0.70,
        0.85,
    ),
    Goal(
        "hand-over inside a pod / memcpy",
        "transfer",
        of("transfer", SHARED, "ratio", what="kv"),
        0.40,
        0.60,
    ),
    most(
        "352 MB of KV, exposed / un-overlapped",
        "handoff",
        of("handoff", "of un-overlapped", what="large"),
        0.25,
        0.10,
    ),
    most(
        "scheduler step, 256 running, us",
        "scheduler",
        together(
            *(of("scheduler", "step_us", state, "256") for state in ("full", "lacking", "stalled"))
        ),
        100.0,
        60.0,
    ),
    most(
        "engine, us per sequence-step",
        "engine_step",
        of("engine_step", "us_per_sequence", running=256),
        2.0,
        1.0,
    ),
    most("start to ready less torch, s", "startup", of("startup", "over_torch"), 3.0, 1.0),
    most(
        "p99 between tokens, split / colocated",
        "interference",
        ratio(
            of("interference", "loaded p99", what="split", same_work=True),
            of("interference", "loaded p99", what="colocated", same_work=True),
        ),
        1.0,
    ),
    most(
        "p99 between tokens, split / p50 at rest",
        "interference",
        of("interference", "loaded p99 / rest p50", what="split", same_work=True),
        None,
        1.5,
    ),
)
