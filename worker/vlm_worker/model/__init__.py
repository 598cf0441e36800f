"""Computes steps: transformers' modules with paged attention. Only this package imports torch.

checkpoint     checks the files of a model directory before loading; no torch
imports        imports transformers without unused parts of torch
loader         loads the parts of a model that the stages need
replace        replaces transformers' modules by the ones below
linear         linear layers with packed weights for CPUs
layers         decoder layers, norms and MLPs as a few kernels
decoder        embeddings to logits, in one native call if all layers allow it
attention      attention over KV blocks and over images
vision         images to embeddings
vision_block   layers of Qwen's vision towers
cgroup         memory and CPUs that the container allows
memory         the KV cache: layout, size, buffer
warmup         the first images and steps
runner         implements `engine.runner.Runner` with the modules above
build          builds a runner: loaded, memory allocated, warmed up
gpu            fused kernels and CUDA graphs for GPUs
"""
