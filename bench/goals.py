"""The performance goals on two cores, and the figure of a benchmark that decides each.

make bench ARGS=--table      prints the table of the latest figures and measures nothing
"""

from __future__ import annotations

from table import Figure, Goal, all_of, median_of_rounds, of, ratio, upper_bound

OURS, PEERS = "triptych", "peers"
SHARED = "shared-memory / memcpy"

PEER_NAMES = {"openvino": "OpenVINO", "vllm": "vLLM", "llama.cpp": "llama.cpp"}


def relative_to(engine: str, what: str) -> Figure:
    """Our figure divided by a peer's, from `make bench-peers`."""
    ours, theirs = (of(PEERS, "per_round", what, engine=name) for name in (OURS, engine))
    return median_of_rounds(ratio(ours, theirs))


def against_peers() -> tuple[Goal, ...]:
    """One goal per peer and column of the peers' table: not slower than the peer."""
    columns = (
        ("TTFT, new image", "ttft_image_s", None, True),
        ("TTFT, text", "ttft_text_s", None, True),
        ("prefill of 575 tokens", "prefill_s", None, True),
        ("mixed trace", "trace_s", 0.95, True),
        ("decode, batch 1", "decode1_tok_s", 1.15, False),
        ("decode, batch 4", "decode4_tok_s", 1.15, False),
        ("decode, batch 16", "decode16_tok_s", 1.15, False),
    )
    return tuple(
        Goal(f"{name} / {peer}", PEERS, relative_to(engine, what), 1.0, aim, is_most=is_most)
        for name, what, aim, is_most in columns
        for engine, peer in PEER_NAMES.items()
    )


def on_request(limit: str, way: str) -> Figure:
    """Speed of a fetch without prebuilt frames, divided by that of `limit`."""
    return ratio(of("transfer", "ms", limit), of("transfer", "ms", f"{way}, built on request"))


GOALS = (
    upper_bound(
        "mixed trace / `generate()`",
        "mixed_trace",
        median_of_rounds(of("mixed_trace", "ratio_per_round")),
        0.45,
    ),
    Goal(
        "decode, share of the limit, batch 1",
        "decode",
        of("decode", "of_limit", batch=1),
        0.75,
        0.85,
    ),
    Goal(
        "decode, share of the limit, batch 4",
        "decode",
        of("decode", "of_limit", batch=4),
        0.60,
        0.75,
    ),
    Goal(
        "decode, share of the limit, batch 16",
        "decode",
        of("decode", "of_limit", batch=16),
        0.65,
        0.75,
    ),
    *against_peers(),
    *(
        Goal(
            f"paged attention, share of bandwidth, {shape}",
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
        "prefill of 575 tokens, share of oneDNN's product",
        "prefill",
        of("prefill.text", "of_limit"),
        0.75,
        0.88,
    ),
    Goal(
        "prefill of 575 tokens, share of the machine's peak",
        "prefill",
        of("prefill.text", "of_machine"),
        None,
    ),
    Goal(
        "image encoding, share of oneDNN's product",
        "prefill",
        of("prefill.encode", "of_limit"),
        0.80,
        0.90,
    ),
    Goal(
        "image encoding, share of the machine's peak",
        "prefill",
        of("prefill.encode", "of_machine"),
        None,
    ),
    Goal(
        "image attention / SDPA",
        "attention",
        of("attention", "against_sdpa", shape="ViT 1024 x 12 x 64"),
        None,
        2.0,
    ),
    upper_bound(
        "TTFT, new image / (operations at the speed of oneDNN's product)",
        "ttft",
        of("ttft", "against_limit", what="new image"),
        1.25,
        1.15,
    ),
    upper_bound(
        "TTFT, cached image / text alone",
        "ttft",
        of("ttft", "against_text", what="cached image"),
        1.05,
    ),
    upper_bound(
        "JPEG 4000x3000 to patches / Pillow",
        "image",
        of("image", "ratio", what="JPEG 4000x3000 to 504x364"),
        0.35,
        0.30,
    ),
    upper_bound(
        "JPEG 1024x1024 to patches / Pillow",
        "image",
        of("image", "ratio", what="JPEG 1024x1024 to 448x448"),
        0.35,
        0.30,
    ),
    upper_bound(
        "JPEG to patches, mean difference to Pillow", "image", of("image", "mean_difference"), 1e-3
    ),
    Goal(
        "KV between pods / raw TCP",
        "transfer",
        of("transfer", "stream / tcp", "ratio"),
        0.70,
        0.85,
    ),
    Goal(
        "embedding between pods, frames built on request / raw TCP",
        "transfer",
        on_request("tcp", "stream"),
        0.70,
        0.85,
    ),
    Goal(
        "KV between pods with mutual TLS / without",
        "transfer",
        of("transfer", "stream, TLS / stream", "ratio", what="kv"),
        0.90,
        1.0,
    ),
    Goal(
        "KV within a pod / memcpy",
        "transfer",
        of("transfer", SHARED, "ratio", what="kv"),
        0.40,
        0.60,
    ),
    Goal(
        "embedding within a pod / memcpy",
        "transfer",
        of("transfer", SHARED, "ratio", what="embedding"),
        0.40,
        0.60,
    ),
    Goal(
        "embedding within a pod, frames built on request / memcpy",
        "transfer",
        on_request("memcpy", "shared-memory"),
        0.40,
        0.60,
    ),
    upper_bound(
        "14 MB of KV, exposed / prefill",
        "handoff",
        ratio(
            of("handoff", "ms", "exposed", what="small"),
            of("handoff", "ms", "prefill", what="small"),
        ),
        0.03,
    ),
    upper_bound(
        "352 MB of KV, exposed / without overlap",
        "handoff",
        of("handoff", "of un-overlapped", what="large"),
        0.25,
        0.10,
    ),
    upper_bound(
        "scheduler step, 256 running, us",
        "scheduler",
        all_of(
            *(of("scheduler", "step_us", state, "256") for state in ("full", "lacking", "stalled"))
        ),
        100.0,
        60.0,
    ),
    upper_bound(
        "scheduler step, 10,000 waiting / 100 waiting",
        "scheduler",
        of("scheduler", "ratio_10000_to_100_waiting"),
        1.2,
    ),
    upper_bound(
        "scheduler step under churn, 256 running, us",
        "scheduler",
        of("scheduler", "step_us", "churn", "256"),
        None,
    ),
    upper_bound(
        "engine, us per sequence and step",
        "engine_step",
        of("engine_step", "us_per_sequence", running=256),
        2.0,
        1.0,
    ),
    upper_bound(
        "start to ready without importing torch, s",
        "startup",
        of("startup", "over_torch"),
        3.0,
        1.0,
    ),
    upper_bound(
        "p99 between tokens, split / colocated",
        "interference",
        ratio(
            of("interference", "loaded p99", what="split", same_work=True),
            of("interference", "loaded p99", what="colocated", same_work=True),
        ),
        1.0,
    ),
    upper_bound(
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
    upper_bound(
        "p99 between tokens, split / p50 at rest",
        "interference",
        of("interference", "loaded p99 / rest p50", what="split", same_work=True),
        None,
        1.5,
    ),
    *(
        upper_bound(
            f"TTFT on {place}, {name}", "cache", of("cache", kind, "ratio", model=model), bound
        )
        for model, place in (("shapes", "`shapes`"), ("larger", "a larger model"))
        for kind, name, bound in (
            ("repeated", "cached image / text alone", 1.05),
            ("text again", "cached text prefix / text alone", 0.20),
            ("image again", "cached image prompt / new", 0.20),
        )
    ),
)
