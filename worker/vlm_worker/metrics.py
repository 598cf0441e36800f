"""Names of everything that gateway and workers measure; docs/metrics.md is tested against them.

Constants only: registries and collectors are made where they are used, so that importing this
costs nothing.
"""

from __future__ import annotations

from typing import Final

TTFT_SECONDS: Final = "vlm_ttft_seconds"  # histogram {modality}
STAGE_SECONDS: Final = "vlm_stage_seconds"  # histogram {stage, modality}
TTFT_STAGE_SECONDS_TOTAL: Final = "vlm_ttft_stage_seconds_total"  # counter {stage, slo, modality}
TTFT_TOTAL: Final = "vlm_ttft_total"  # counter {slo, modality}
ITL_SECONDS: Final = "vlm_itl_seconds"  # histogram
KV_TOKENS: Final = "vlm_kv_tokens"  # gauge {state}: running, reserved, cached, free
KV_CAPACITY_TOKENS: Final = "vlm_kv_capacity_tokens"  # gauge
KV_QUEUED_TOKENS: Final = "vlm_kv_queued_tokens"  # gauge
KV_REQUEST_BYTES: Final = "vlm_kv_request_bytes"  # histogram {modality}
KV_TRANSFER_SECONDS: Final = "vlm_kv_transfer_seconds"  # histogram
KV_TRANSFER_BYTES: Final = "vlm_kv_transfer_bytes_total"  # counter
EMBED_TRANSFER_SECONDS: Final = "vlm_embed_transfer_seconds"  # histogram
EMBED_TRANSFER_BYTES: Final = "vlm_embed_transfer_bytes_total"  # counter
WORK_QUEUED_SECONDS: Final = "vlm_work_queued_seconds"  # gauge
WORK_ADMITTED_SECONDS_TOTAL: Final = "vlm_work_admitted_seconds_total"  # counter
MEDIA_SECONDS: Final = "vlm_media_seconds"  # histogram {part}: queue, decode, prepare, key
MEDIA_FAILURES_TOTAL: Final = "vlm_media_failures_total"  # counter {reason}
OUTPUT_TOKENS_TOTAL: Final = "vlm_output_tokens_total"  # counter
QUEUE_REQUESTS: Final = "vlm_queue_requests"  # gauge {lane}: text, vision
QUEUE_IMAGES: Final = "vlm_queue_images"  # gauge
QUEUE_OLDEST_SECONDS: Final = "vlm_queue_oldest_seconds"  # gauge
ADMITTED_TOTAL: Final = "vlm_admitted_total"  # counter {reason}
REFUSED_TOTAL: Final = "vlm_refused_total"  # counter {bound}
RUNNING_LIMIT: Final = "vlm_running_limit"  # gauge
VISUAL_TOKENS_TOTAL: Final = "vlm_visual_tokens_total"  # counter
VISUAL_TOKENS_PER_REQUEST: Final = "vlm_visual_tokens_per_request"  # histogram
PATCHES_TOTAL: Final = "vlm_patches_total"  # counter
IMAGES_TOTAL: Final = "vlm_images_total"  # counter
ENCODER_CACHE_HITS: Final = "vlm_encoder_cache_hits_total"  # counter {tier}: hot, cold
ENCODER_CACHE_JOINS: Final = "vlm_encoder_cache_joins_total"  # counter
ENCODER_CACHE_MISSES: Final = "vlm_encoder_cache_misses_total"  # counter
ENCODER_CACHE_BYTES: Final = "vlm_encoder_cache_bytes"  # gauge {tier}
ENCODER_CACHE_EVICTIONS: Final = "vlm_encoder_cache_evictions_total"  # counter {tier}
ENCODER_CACHE_MOVES: Final = "vlm_encoder_cache_moves_total"  # counter {to}: hot, cold
ENCODER_CACHE_EXPIRATIONS: Final = "vlm_encoder_cache_expirations_total"  # counter
PREFIX_CACHE_QUERIES: Final = (
    "vlm_prefix_cache_queries_total"  # counter {kind}: text, visual; tokens
)
PREFIX_CACHE_HITS: Final = "vlm_prefix_cache_hits_total"  # counter {kind}, tokens
PREFIX_CACHE_EVICTIONS: Final = "vlm_prefix_cache_evictions_total"  # counter, blocks
# counter {outcome}: ok, invalid, rejected, cancelled, error
REQUESTS_TOTAL: Final = "vlm_requests_total"
# counter {bound}: memory, tenant_memory, waiting, connections
GATEWAY_REFUSED_TOTAL: Final = "vlm_gateway_refused_total"
GATEWAY_MEMORY_BYTES: Final = "vlm_gateway_memory_bytes"  # gauge {kind}: body, prompt
GATEWAY_MEMORY_LIMIT_BYTES: Final = "vlm_gateway_memory_limit_bytes"  # gauge
INFLIGHT: Final = "vlm_inflight"  # gauge
ACCEPTING: Final = "vlm_accepting"  # gauge
HEARTBEAT_TIMESTAMP_SECONDS: Final = "vlm_heartbeat_timestamp_seconds"  # gauge
BATCH_OCCUPANCY: Final = "vlm_batch_occupancy"  # gauge
PREEMPTIONS_TOTAL: Final = "vlm_preemptions_total"  # counter
OUT_OF_MEMORY_TOTAL: Final = "vlm_out_of_memory_total"  # counter
LEASES: Final = "vlm_leases"  # gauge {state}: held, reserved, quarantined
LEASES_EXPIRED_TOTAL: Final = "vlm_leases_expired_total"  # counter
TRANSFERS_REFUSED_TOTAL: Final = "vlm_transfers_refused_total"  # counter {reason}
# gauges {kind}: uploads, images, embeddings, exposed
REQUEST_MEMORY_BYTES: Final = "vlm_request_memory_bytes"
REQUEST_MEMORY_LIMIT_BYTES: Final = "vlm_request_memory_limit_bytes"
NATIVE_KERNELS_INFO: Final = "vlm_native_kernels_info"  # gauge {variant}, always 1
EXPOSED_BYTES: Final = "vlm_exposed_bytes"  # gauge {state}: used, lost
INVARIANT_VIOLATIONS_TOTAL: Final = "vlm_invariant_violations_total"  # counter

SECONDS_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5,
    0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
# Stages have many series: few edges keep a gateway below 500 of them.
STAGE_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
