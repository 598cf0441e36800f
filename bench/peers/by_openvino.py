"""OpenVINO GenAI: `ContinuousBatchingPipeline` with the precision of its export."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
import serving
from PIL import Image

MODEL_DIR = sys.argv[1]
KV_GIGABYTES = 2


def main() -> None:
    """Load, then serve."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = KV_GIGABYTES
    scheduler.max_num_seqs = 16
    scheduler.max_num_batched_tokens = serving.options()["max_num_batched_tokens"]
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(MODEL_DIR, scheduler, "CPU", {})

    def run(calls: Sequence[dict[str, Any]]) -> int:
        handles = []
        for number, call in enumerate(calls):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = call["num_output"]
            config.ignore_eos = True
            config.do_sample = False
            images = [openvino.Tensor(_pixels(call["image"]))] if call["image"] else []
            handles.append(pipeline.add_request(number, call["text"], images, config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)

    serving.serve(run)


def _pixels(path: str) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))[None]


if __name__ == "__main__":
    main()
