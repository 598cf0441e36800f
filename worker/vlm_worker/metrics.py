"""Names of all metrics of gateway and workers; a test compares docs/metrics.md to them.

Only constants: the modules that use registries and collectors create them, so that importing this
one is cheap.
"""

from __future__ import annotations

from typing import Final

TTFT_SECONDS: Final = "triptych_ttft_seconds"  # histogram {modality}
STAGE_SECONDS: Final = "triptych_stage_seconds"  # histogram {stage, modality}
TTFT_STAGE_SECONDS_TOTAL: Final = (
    "triptych_ttft_stage_seconds_total"  # counter {stage, slo, modality}
)
SLO_REQUESTS_TOTAL: Final = "triptych_slo_requests_total"  # counter {slo, modality}
ITL_SECONDS: Final = "triptych_itl_seconds"  # histogram
KV_TOKENS: Final = "triptych_kv_tokens"  # gauge {state}: running, reserved, cached, free
KV_CAPACITY_TOKENS: Final = "triptych_kv_capacity_tokens"  # gauge
KV_QUEUED_TOKENS: Final = "triptych_kv_queued_tokens"  # gauge
KV_REQUEST_BYTES: Final = "triptych_kv_request_bytes"  # histogram {modality}
KV_TRANSFER_SECONDS: Final = "triptych_kv_transfer_seconds"  # histogram
KV_TRANSFER_BYTES: Final = "triptych_kv_transfer_bytes_total"  # counter
EMBED_TRANSFER_SECONDS: Final = "triptych_embed_transfer_seconds"  # histogram
EMBED_TRANSFER_BYTES: Final = "triptych_embed_transfer_bytes_total"  # counter
WORK_QUEUED_SECONDS: Final = "triptych_work_queued_seconds"  # gauge
WORK_STARTED_SECONDS_TOTAL: Final = "triptych_work_started_seconds_total"  # counter
MEDIA_SECONDS: Final = "triptych_media_seconds"  # histogram {part}: queue, decode, prepare, key
MEDIA_FAILURES_TOTAL: Final = "triptych_media_failures_total"  # counter {reason}
OUTPUT_TOKENS_TOTAL: Final = "triptych_output_tokens_total"  # counter
QUEUE_REQUESTS: Final = "triptych_queue_requests"  # gauge {lane}: text, vision
QUEUE_IMAGES: Final = "triptych_queue_images"  # gauge
QUEUE_OLDEST_SECONDS: Final = "triptych_queue_oldest_seconds"  # gauge
ADMITTED_TOTAL: Final = "triptych_admitted_total"  # counter {reason}
REFUSED_TOTAL: Final = "triptych_refused_total"  # counter {bound}
MAX_RUNNING_REQUESTS: Final = "triptych_max_running_requests"  # gauge
VISUAL_TOKENS_TOTAL: Final = "triptych_visual_tokens_total"  # counter
VISUAL_TOKENS_PER_REQUEST: Final = "triptych_visual_tokens_per_request"  # histogram
PATCHES_TOTAL: Final = "triptych_patches_total"  # counter
IMAGES_TOTAL: Final = "triptych_images_total"  # counter
ENCODER_CACHE_HITS: Final = "triptych_encoder_cache_hits_total"  # counter {tier}: hot, cold
ENCODER_CACHE_JOINS: Final = "triptych_encoder_cache_joins_total"  # counter
ENCODER_CACHE_MISSES: Final = "triptych_encoder_cache_misses_total"  # counter
ENCODER_CACHE_BYTES: Final = "triptych_encoder_cache_bytes"  # gauge {tier}
ENCODER_CACHE_EVICTIONS: Final = "triptych_encoder_cache_evictions_total"  # counter {tier}
ENCODER_CACHE_MOVES: Final = "triptych_encoder_cache_moves_total"  # counter {to}: hot, cold
ENCODER_CACHE_EXPIRATIONS: Final = "triptych_encoder_cache_expirations_total"  # counter
PREFIX_CACHE_QUERIES: Final = (
    "triptych_prefix_cache_queries_total"  # counter {kind}: text, visual; tokens
)
PREFIX_CACHE_HITS: Final = "triptych_prefix_cache_hits_total"  # counter {kind}, tokens
PREFIX_CACHE_EVICTIONS: Final = "triptych_prefix_cache_evictions_total"  # counter, blocks
# counter {outcome}: ok, invalid, rejected, cancelled, error
REQUESTS_TOTAL: Final = "triptych_requests_total"
# counter {bound}: memory, tenant_memory, waiting, connections
GATEWAY_REFUSED_TOTAL: Final = "triptych_gateway_refused_total"
GATEWAY_MEMORY_BYTES: Final = "triptych_gateway_memory_bytes"  # gauge {kind}: body, prompt
GATEWAY_MEMORY_LIMIT_BYTES: Final = "triptych_gateway_memory_limit_bytes"  # gauge
INFLIGHT: Final = "triptych_inflight"  # gauge
ACCEPTING: Final = "triptych_accepting"  # gauge
HEARTBEAT_TIMESTAMP_SECONDS: Final = "triptych_heartbeat_timestamp_seconds"  # gauge
BATCH_OCCUPANCY: Final = "triptych_batch_occupancy"  # gauge
PREEMPTIONS_TOTAL: Final = "triptych_preemptions_total"  # counter
OUT_OF_MEMORY_TOTAL: Final = "triptych_out_of_memory_total"  # counter
LEASES: Final = "triptych_leases"  # gauge {state}: held, reserved, quarantined
LEASES_EXPIRED_TOTAL: Final = "triptych_leases_expired_total"  # counter
TRANSFERS_REFUSED_TOTAL: Final = "triptych_transfers_refused_total"  # counter {reason}
# gauges {kind}: uploads, images, embeddings, exposed
REQUEST_MEMORY_BYTES: Final = "triptych_request_memory_bytes"
REQUEST_MEMORY_LIMIT_BYTES: Final = "triptych_request_memory_limit_bytes"
MEMORY_DECLARED_BYTES: Final = "triptych_memory_declared_bytes"  # gauge {part}
MEMORY_DECLARED_TOTAL_BYTES: Final = "triptych_memory_declared_total_bytes"  # gauge
MEMORY_RESIDENT_BYTES: Final = "triptych_memory_resident_bytes"  # gauge
NATIVE_KERNELS_INFO: Final = "triptych_native_kernels_info"  # gauge {variant}, always 1
EXPOSED_BYTES: Final = "triptych_exposed_bytes"  # gauge {state}: used, lost
INVARIANT_VIOLATIONS_TOTAL: Final = "triptych_invariant_violations_total"  # counter

SECONDS_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5,
    0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
# Stages have many series: with few bucket edges, a gateway has fewer than 500 of them.
STAGE_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
