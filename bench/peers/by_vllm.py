"""vLLM for CPUs: its offline engine, with continuous batching, on all cores."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import serving
from PIL import Image

MODEL_DIR = sys.argv[1]
NUM_CORES = os.cpu_count() or 1
KV_GIGABYTES = 2
PRELOADED = (
    str(Path(sys.prefix) / "lib" / "libiomp5.so"),
    ctypes.util.find_library("tcmalloc_minimal"),
)


def main() -> None:
    """Load, then serve."""
    os.environ |= {  # noqa: TID251  vLLM reads them when it is imported, its own process at start
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIGABYTES),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_CORES - 1}",
        "OMP_NUM_THREADS": str(NUM_CORES),
        "LD_PRELOAD": ":".join(filter(None, PRELOADED)),
    }
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=MODEL_DIR, dtype="bfloat16", max_model_len=2048, max_num_seqs=16,
        **serving.options(), limit_mm_per_prompt={"image": 1, "video": 0},
        enable_prefix_caching=False, mm_processor_cache_gb=0,
    )  # fmt: skip

    def run(calls: Sequence[dict[str, Any]]) -> int:
        prompts = []
        for call in calls:
            images = {"image": Image.open(call["image"])} if call["image"] else {}
            prompts.append({"prompt": serving.prompt(call), "multi_modal_data": images})
        lengths = [
            SamplingParams(max_tokens=call["num_output"], ignore_eos=True, temperature=0)
            for call in calls
        ]
        answers = engine.generate(prompts, lengths, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    serving.serve(run)


if __name__ == "__main__":
    main()
