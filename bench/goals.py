"""The goals of speed, on two cores: which figure of which benchmark answers which.

make bench ARGS=--table      the table of what was measured last, nothing measured
"""

from __future__ import annotations

from table import Figure, Goal, most, of, ratio, together, typical

OURS, PEERS = "triptych", "peers"
SHARED = "shared-memory / memcpy"


PEER_NAMES = {"openvino": "OpenVINO", "vllm": "vLLM", "llama.cpp": "llama.cpp"}


def ahead_of(engine: str, what: str) -> Figure:
    """Ours over a peer's, of `make bench-peers`."""
    ours, theirs = (of(PEERS, "per_round", what, engine=name) for name in (OURS, engine))
    return typical(ratio(ours, theirs))


def against_peers() -> tuple[Goal, ...]:
    """One goal for each peer and each column of the peers' table: never behind."""
    columns = (
        ("TTFT, new image", "ttft_picture_s", None, True),
        ("TTFT, text", "ttft_text_s", None, True),
        ("prefill of 575 tokens", "prefill_s", None, True),
        ("mixed trace", "trace_s", 0.95, True),
        ("decode, batch 1", "decode1_tok_s", 1.15, False),
        ("decode, batch 4", "decode4_tok_s", 1.15, False),
        ("decode, batch 16", "decode16_tok_s", 1.15, False),
    )
    return tuple(
        Goal(f"{name} / {peer}", PEERS, ahead_of(engine, what), 1.0, aim, is_most=is_most)
        for name, what, aim, is_most in columns
        for engine, peer in PEER_NAMES.items()
    )


def when_asked(limit: str, way: str) -> Figure:
    """The speed of a fetch whose frames were not made before, over that of `limit`."""
    return ratio(of("transfer", "ms", limit), of("transfer", "ms", f"{way}, made when asked"))


GOALS = (
    most(
        "mixed trace / `generate()`",
        "mixed_trace",
        typical(of("mixed_trace", "ratio_per_round")),
        0.45,
    ),
    Goal("decode, of the limit, batch 1", "decode", of("decode", "of_limit", batch=1), 0.75, 0.85),
    Goal("decode, of the limit, batch 4", "decode", of("decode", "of_limit", batch=4), 0.60, 0.75),
    Goal(
        "decode, of the limit, batch 16", "decode", of("decode", "of_limit", batch=16), 0.65, 0.75
    ),
    *against_peers(),
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
    Goal(
        "prefill of 575 tokens, of oneDNN's product",
        "prefill",
        of("prefill.text", "of_limit"),
        0.75,
        0.88,
    ),
    Goal(
        "prefill of 575 tokens, of the machine's peak",
        "prefill",
        of("prefill.text", "of_machine"),
        None,
    ),
    Goal(
        "vision encode, of oneDNN's product",
        "prefill",
        of("prefill.encode", "of_limit"),
        0.80,
        0.90,
    ),
    Goal(
        "vision encode, of the machine's peak", "prefill", of("prefill.encode", "of_machine"), None
    ),
    Goal(
        "attention of a picture / SDPA",
        "attention",
        of("attention", "against_sdpa", shape="ViT 1024 x 12 x 64"),
        None,
        2.0,
    ),
    most(
        "TTFT, new picture / (operations at the speed of oneDNN's product)",
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
    most(
        "JPEG 1024x1024 to patches / Pillow",
        "image",
        of("image", "ratio", what="JPEG 1024x1024 to 448x448"),
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
        "an embedding between pods, frames made when asked / raw TCP",
        "transfer",
        when_asked("tcp", "stream"),
        0.70,
        0.85,
    ),
    Goal(
        "hand-over of KV inside a pod / memcpy",
        "transfer",
        of("transfer", SHARED, "ratio", what="kv"),
        0.40,
        0.60,
    ),
    Goal(
        "hand-over of an embedding inside a pod / memcpy",
        "transfer",
        of("transfer", SHARED, "ratio", what="embedding"),
        0.40,
        0.60,
    ),
    Goal(
        "the same, frames made when asked / memcpy",
        "transfer",
        when_asked("memcpy", "shared-memory"),
        0.40,
        0.60,
    ),
    most(
        "14 MB of KV, exposed / prefill",
        "handoff",
        ratio(
            of("handoff", "ms", "exposed", what="small"),
            of("handoff", "ms", "prefill", what="small"),
        ),
        0.03,
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
        "scheduler step, 10,000 waiting / 100 waiting",
        "scheduler",
        of("scheduler", "ratio_10000_to_100_waiting"),
        1.2,
    ),
    most(
        "scheduler step under churn, 256 running, us",
        "scheduler",
        of("scheduler", "step_us", "churn", "256"),
        None,
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
        "p50 between tokens, split / colocated",
        "interference",
        ratio(
            of("interference", "loaded p50", what="split", same_work=True),
            of("interference", "loaded p50", what="colocated", same_work=True),
        ),
        None,
    ),
    Goal(
        "tokens under load, split / colocated",
        "interference",
        ratio(
            of("interference", "tokens", 1, what="split", same_work=True),
            of("interference", "tokens", 1, what="colocated", same_work=True),
        ),
        None,
    ),
    most(
        "p99 between tokens, split / p50 at rest",
        "interference",
        of("interference", "loaded p99 / rest p50", what="split", same_work=True),
        None,
        1.5,
    ),
    *(
        most(f"TTFT on {place}, {name}", "cache", of("cache", kind, "ratio", model=model), bound)
        for model, place in (("shapes", "`shapes`"), ("larger", "a larger model"))
        for kind, name, bound in (
            ("repeated", "an image seen before / text alone", 1.05),
            ("text again", "a text's beginning seen before / text alone", 0.20),
            ("picture again", "an image's prompt seen before / new", 0.20),
        )
    ),
)
