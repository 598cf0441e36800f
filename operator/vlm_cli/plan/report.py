"""The sections of a plan, from the model's facts to the recommended pools. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vlm_cli.plan import capacity, manifest, pool
from vlm_cli.plan.facts import ModelFacts
from vlm_cli.plan.fields import PlanError
from vlm_cli.plan.load import Load
from vlm_cli.plan.manifest import Service
from vlm_cli.plan.nodes import Node
from vlm_cli.plan.pool import Numbers
from vlm_cli.plan.speed import CALL_SECONDS
from vlm_cli.plan.topology import STAGES, Candidate, Choice, Network, choose
from vlm_cli.sections import FactSection, Figure, NoteSection, Section, TableSection
from vlm_operator.api.enums import Topology
from vlm_operator.api.pool import LENT_KV_PERCENT
from vlm_operator.cluster import Manifest
from vlm_operator.names import POOL_ROLES, Role

SIZES = ((336, 336), (512, 512), (1024, 1024), (1280, 720), (1920, 1080), (3840, 2160))
"""Sizes of the table of visual tokens, in addition to the load's."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What `plan` plans.

    Attributes:
        load: None for a report without topologies.
        shares: of peak compute and bandwidth that are reached.
    """

    facts: ModelFacts
    nodes: Sequence[Node]
    load: Load | None
    service: Service
    shares: tuple[float, float]
    network_gbit: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A report, and the manifest; None without a load, or if no topology meets its goals."""

    sections: tuple[Section, ...]
    manifest: Manifest | None
    choice: Choice | None

    @property
    def is_feasible(self) -> bool:
        return self.choice is None or self.choice.recommended is not None


def plan(request: Request) -> Plan:
    """Compute everything.

    Raises:
        PlanError: the load cannot be served by this model, or no topology can run at all.
    """
    facts, load = request.facts, request.load
    visual_share = 0.0
    if load is not None:
        load.check(facts)
        visual_share = load.visual_share(facts)
    numbers = request.service.numbers(facts.dtype, visual_share=visual_share)
    sections: list[Section] = [
        _model(facts, numbers),
        _kv_types(facts),
        _images(facts, load),
        _weights(facts, numbers),
        _nodes(facts, request.nodes, numbers, load),
        _lending(facts, request.nodes, numbers),
    ]
    choice = written = None
    if load is not None:
        network = Network(request.network_gbit * 1e9 / 8)
        sections.append(_transfers(facts, load, numbers, network))
        choice = choose(
            facts,
            load,
            request.nodes,
            numbers=numbers,
            shares=request.shares,
            network=network,
        )
        if not choice.candidates:
            problems = "; ".join(f"{name}: {why}" for name, why in choice.refused.items())
            raise PlanError(f"no topology can run on these node classes: {problems}")
        sections.append(_topologies(choice))
        if choice.recommended is not None:
            written = manifest.build(request.service, load, choice.recommended)
            sections.append(_pools(choice.recommended, load, choice))
        sections.append(NoteSection("reasons", "Why", choice.reasons))
    sections.append(NoteSection("assumptions", "Assumed, not measured", _assumptions(request)))
    return Plan(tuple(sections), written, choice)


def _model(facts: ModelFacts, numbers: Numbers) -> Section:
    token_bytes = numbers.kv_token_bytes(facts)
    rows: dict[str, Figure | str] = {
        "family": facts.model_type,
        "dtype": facts.dtype,
        "parameters": Figure(
            facts.num_parameters, "parameters", "Σ of the shapes; a shared table counts once"
        ),
        "layers": Figure(facts.num_layers, "layers"),
        "heads": Figure(facts.num_heads, "heads"),
        "KV heads": Figure(facts.num_kv_heads, "heads"),
        "head size": Figure(facts.head_dim, "numbers"),
        "longest sequence": Figure(facts.max_model_len, "tokens"),
        "KV per token": Figure(token_bytes, "B", _kv_formula(facts, numbers)),
        "embedding per visual token": Figure(
            capacity.embedding_bytes(facts, 1),
            "B",
            f"{facts.hidden_size} hidden size · {facts.item_bytes} B",
        ),
    }
    if facts.num_sliding_layers:
        window = facts.sliding_window
        read = capacity.kv_read_bytes(
            facts, numbers.kv_dtype, facts.max_model_len, numbers.visual_share
        )
        rows["sliding layers"] = Figure(facts.num_sliding_layers, "layers")
        rows["window"] = Figure(window, "tokens")
        rows["KV that a step reads of the longest sequence"] = Figure(
            read,
            "B",
            f"per layer: all {facts.max_model_len} tokens, in a sliding layer {window}; "
            "the worker keeps all tokens of all layers",
        )
    return FactSection("model", f"Model {facts.path}", rows)


def _kv_formula(facts: ModelFacts, numbers: Numbers) -> str:
    kv_dtype = numbers.kv_dtype
    if kv_dtype in capacity.MIXED_KV:
        return f"mean of {kv_dtype} in the next table; {numbers.visual_share:.0%} are visual tokens"
    scale = capacity.KV_SCALE_BYTES.get(kv_dtype, 0)
    row = f"{facts.head_dim} · {capacity.KV_ITEM_BYTES[kv_dtype]} B"
    row = f"({row} + {scale} B scale)" if scale else row
    return f"2 · {facts.num_layers} layers · {facts.num_kv_heads} KV heads · {row}"


def _kv_types(facts: ModelFacts) -> Section:
    formula = "2 · layers · KV heads · (head size · bytes + 4 B scale; kivi4: per 32)"
    found: list[tuple[str, int, int]] = []
    for kv_dtype in (facts.dtype, "int8"):
        token_bytes = capacity.kv_token_bytes(facts, kv_dtype)
        found.append((kv_dtype, token_bytes, token_bytes))
    mixed = capacity.mixed_kv_token_bytes(facts)
    if mixed is not None:
        narrow, wide = mixed
        found += [("vision=int8", narrow, wide), ("text=int8", wide, narrow)]
    kivi4 = capacity.kivi4_token_bytes(facts)
    if kivi4 is not None:
        found.append(("vision=kivi4", *kivi4))
    rows: list[dict[str, Figure | str]] = [
        {
            "KV dtype": kv_dtype,
            "KV per visual token": Figure(visual, "B", formula),
            "KV per text token": Figure(text, "B", formula),
        }
        for kv_dtype, visual, text in found
    ]
    return TableSection("kvTypes", "KV by number type", rows)


def _images(facts: ModelFacts, load: Load | None) -> Section:
    sizes = dict.fromkeys((*(load.images if load else ()), *SIZES))
    rows: list[dict[str, Figure | str]] = []
    for width, height in sizes:
        full = facts.sizing.count(width, height)
        low = facts.sizing.count(width, height, low_detail=True)
        rows.append(
            {
                "image": f"{width}x{height}",
                "seen as": f"{full.width}x{full.height}",
                "patches": Figure(
                    full.num_patches, "patches", f"height · width / {facts.sizing.patch_size}²"
                ),
                "tokens": Figure(full.num_tokens, "tokens", facts.sizing.formula),
                "tokens low": Figure(
                    low.num_tokens, "tokens", "the same with the pixel limit of `detail: low`"
                ),
                "embedding": Figure(
                    capacity.embedding_bytes(facts, full.num_tokens),
                    "B",
                    "tokens · hidden size · bytes per number",
                ),
            }
        )
    return TableSection("images", "Visual tokens by size and detail", rows)


def _weights(facts: ModelFacts, numbers: Numbers) -> Section:
    rows: list[dict[str, Figure | str]] = []
    pods = dict.fromkeys(stages for roles in STAGES.values() for stages in roles.values())
    for stages in sorted(pods, key=len):
        memory = capacity.device_memory(facts, stages, 0, weights=numbers.weights)
        weights, cache = memory.weights, memory.encoder_cache
        rows.append(
            {
                "stages": ", ".join(stages),
                "weights": Figure(
                    weights,
                    "B",
                    "encoder: tower, projector; else layers, table, head (a shared one once)",
                ),
                "activations": Figure(
                    memory.activations,
                    "B",
                    f"a step of {capacity.STEP_TOKENS} tokens, and the largest image that the "
                    "model takes",
                ),
                "encoder cache": Figure(cache, "B", "the worker's default on the device"),
                "runtime": Figure(capacity.RUNTIME_BYTES, "B", "assumed: driver and libraries"),
                "without KV": Figure(memory.missing, "B", "the sum of the four"),
            }
        )
    return TableSection(
        "weights", f"Memory of a pod by its stages, weights {numbers.weights}", rows
    )


def _nodes(
    facts: ModelFacts, nodes: Sequence[Node], numbers: Numbers, load: Load | None
) -> Section:
    rows: list[dict[str, Figure | str]] = []
    token_bytes = numbers.kv_token_bytes(facts)
    num_tokens = facts.max_model_len
    if load is not None:
        num_tokens = load.prompt_tokens + load.visual_tokens(facts) + load.output_tokens
    for node in nodes:
        for topology in (Topology.DECODE, Topology.PREFILL_DECODE):
            stages = STAGES[topology][Role.DECODE]
            row: dict[str, Figure | str] = {
                "class": node.name,
                "pod": "all stages" if len(stages) > 1 else "decode only",
            }
            memory = None
            if node.memory is not None:
                memory = node.memory_of(facts, stages, weights=numbers.weights)
            if memory is None or memory.missing or not memory.kv:
                why = numbers.refusal(node, facts, stages, Role.DECODE)
                rows.append({**row, "KV": "-", "tokens": "-", "requests": "-", "why": why or "-"})
                continue
            block_size = capacity.block_size_of(
                has_accelerator=node.has_accelerator, kv_dtype=numbers.kv_dtype
            )
            fits = capacity.concurrency(
                memory.kv, num_tokens, token_bytes=token_bytes, block_size=block_size
            )
            rows.append(
                {
                    **row,
                    "KV": Figure(
                        memory.kv,
                        "B",
                        f"{capacity.KV_PERCENT} % of (memory - runtime - weights), at most what "
                        "activations and encoder cache leave",
                    ),
                    "tokens": Figure(memory.kv // token_bytes, "tokens", "KV / KV per token"),
                    "requests": Figure(
                        fits,
                        "requests",
                        f"whole blocks of {block_size} tokens: (KV blocks - 1) / blocks of "
                        f"{num_tokens} tokens",
                    ),
                    "why": "",
                }
            )
    title = f"Concurrency of one pod, for sequences of {num_tokens} tokens"
    return TableSection("concurrency", title, rows)


def _lending(facts: ModelFacts, nodes: Sequence[Node], numbers: Numbers) -> Section:
    """The price of `pools.encoder.maxLentRequests`, per encoder pod."""
    rows: list[dict[str, Figure | str]] = []
    one, every = ((Role.ENCODER,), tuple(POOL_ROLES))
    weights = capacity.weights_bytes(facts, every, numbers.weights)
    weights -= capacity.weights_bytes(facts, one, numbers.weights)
    token_bytes = numbers.kv_token_bytes(facts)
    for node in nodes:
        row: dict[str, Figure | str] = {
            "class": node.name,
            "decoder weights": Figure(
                weights, "B", "what all stages load beside tower and projector"
            ),
        }
        why = numbers.refusal(node, facts, every, Role.ENCODER)
        if node.memory is None or why is not None:
            rows.append({**row, "KV": "-", "tokens": "-", "why": why or "its memory is unknown"})
            continue
        kv = capacity.lent_kv_bytes(node.memory_of(facts, every, weights=numbers.weights))
        figure = f"at most {LENT_KV_PERCENT} % of (memory - runtime - weights)"
        tokens = Figure(kv // token_bytes, "tokens", "KV / KV per token")
        rows.append({**row, "KV": Figure(kv, "B", figure), "tokens": tokens, "why": ""})
    title = "Price of maxLentRequests, per encoder pod"
    return TableSection("lending", title, rows)


def _transfers(facts: ModelFacts, load: Load, numbers: Numbers, network: Network) -> Section:
    visual = load.visual_tokens(facts)
    prompt = load.prompt_tokens + visual
    block_size = capacity.block_size_of(has_accelerator=True, kv_dtype=numbers.kv_dtype)
    embeddings = capacity.embedding_bytes(facts, visual)
    handoff = capacity.handoff_bytes(
        facts,
        numbers.kv_dtype,
        prompt,
        block_size=block_size,
        visual_share=visual / prompt if prompt else 0.0,
    )
    rows: dict[str, Figure | str] = {
        "visual tokens": Figure(visual, "tokens", "Σ over the images of a request"),
        "prompt": Figure(prompt, "tokens", "text + visual"),
        "E→P bytes": Figure(embeddings, "B", "visual tokens · hidden size · bytes per number"),
        "P→D bytes": Figure(
            handoff, "B", f"KV per token · prompt, in whole blocks of {block_size} tokens"
        ),
        "E→P time": Figure(
            embeddings / network.bytes_per_second, "s", "bytes / network; a part of TTFT"
        ),
        "P→D time": Figure(
            handoff / network.bytes_per_second,
            "s",
            "bytes / network; overlaps with prefill, the rest is before token 2",
        ),
    }
    if embeddings:
        rows["P→D per E→P"] = Figure(handoff / embeddings, "", "P→D bytes / E→P bytes")
    return FactSection("transfers", "Transfers of one request with images", rows)


def _topologies(choice: Choice) -> Section:
    unit = "per hour" if choice.has_prices else "pods"
    rows: list[dict[str, Figure | str]] = []
    for one in choice.candidates:
        works = one.problem is None
        rows.append(
            {
                "topology": str(one.topology),
                "pods": ", ".join(
                    f"{f'{state.replicas} ' if works else ''}{role} on {pool.node.name}"
                    for role, (pool, state) in one.pools.items()
                ),
                "cost": Figure(one.cost, unit, "Σ replicas · price") if works else "-",
                "TTFT p95": Figure(
                    one.ttft if works else float("inf"),
                    "s",
                    "Σ (service + 3 · mean wait of M/M/c) + E→P time",
                ),
                "ITL p95": Figure(
                    one.itl if works else float("inf"),
                    "s",
                    "step / (1 - utilization); with a prompt's chunk if such steps are over 5 %",
                ),
                "verdict": one.problem or "meets the goals",
            }
        )
    rows += [
        {
            "topology": str(topology),
            "pods": "-",
            "cost": "-",
            "TTFT p95": "-",
            "ITL p95": "-",
            "verdict": why,
        }
        for topology, why in choice.refused.items()
    ]
    return TableSection("topologies", "Topologies, each on its cheapest node classes", rows)


def _pools(candidate: Candidate, load: Load, choice: Choice) -> Section:
    rows: list[dict[str, Figure | str]] = []
    for role, (plan, state) in candidate.pools.items():
        price = plan.node.price if choice.has_prices else 1.0
        rows.append(
            {
                "pool": str(role),
                "class": plan.node.name,
                "pods": Figure(state.replicas, "pods", "fewest that meet targets and goals"),
                "busy": Figure(
                    100 * state.utilization,
                    "%",
                    f"requests/s · (encode + prefill) / pods; target {pool.MAX_UTILIZATION:.0%}",
                ),
                "service": Figure(state.service, "s", "encode + prefill of a request with images"),
                "wait p95": Figure(state.wait, "s", "3 · mean wait of M/M/c (Sakasegawa)"),
                "network": Figure(
                    100 * state.network,
                    "%",
                    "requests/s · bytes in or out per request / network, per pod; "
                    f"target {pool.MAX_UTILIZATION:.0%}",
                ),
                "running answers": Figure(
                    state.num_running, "answers", "answers/s · output tokens · ITL, per pod"
                ),
                "KV in use": Figure(
                    100 * state.kv_occupancy,
                    "%",
                    f"running / sequences that fit; target {pool.MAX_KV_OCCUPANCY:.0%}",
                ),
                "cost": Figure(
                    state.replicas * (price or 0.0),
                    "per hour" if choice.has_prices else "pods",
                    "replicas · price",
                ),
            }
        )
    per_thousand = 1000 * candidate.cost / (load.rate * 3600)
    title = f"Recommended: {candidate.topology}"
    if choice.has_prices:
        title += f", {candidate.cost:.2f} per hour, {per_thousand:.3g} per 1000 requests"
    return TableSection("pools", title, rows)


def _assumptions(request: Request) -> list[str]:
    compute, bandwidth = request.shares
    found = [
        *request.facts.assumptions,
        f"{capacity.RUNTIME_BYTES / 2**30:g} GiB of each device for driver and libraries.",
        f"KV has {capacity.KV_PERCENT} % of what is left, the worker's default; "
        "the manifest sets kv.memory.",
    ]
    if request.service.kv_dtype == "fp8":
        found.append(
            "KV in fp8 needs GPUs of compute capability 8.9 or later; this is not checked."
        )
    for node in request.nodes:
        found += node.assumptions
        if node.price is None:
            found.append(f"{node.name} has no cost: pods are counted instead.")
    if request.load is not None:
        found += [
            f"{compute:.0%} of peak compute and {bandwidth:.0%} of bandwidth are reached; "
            "--compute-share and --bandwidth-share set what you measured.",
            f"{request.network_gbit:g} Gbit/s between pods (--network-gbit).",
            f"Each step and each encoder call takes {CALL_SECONDS * 1000:g} ms more.",
            f"A worker runs at most {capacity.STEP_ROWS} requests at once, its default of "
            "--max-requests; KV may hold more.",
            "Requests arrive at random and are independent; no prefix or image is in a cache.",
            "While a pod encodes an image, its decode steps take twice as long.",
        ]
    return found


def to_json(found: Plan, *, data: dict[str, Any]) -> dict[str, Any]:
    """Add the recommendation and the manifest to the data of the sections."""
    recommended = found.choice.recommended if found.choice is not None else None
    return {
        **data,
        "recommended": str(recommended.topology) if recommended is not None else None,
        "manifest": found.manifest,
    }
