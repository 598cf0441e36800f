"""Computes steps: transformers' modules with paged attention. Only this package imports torch.

checkpoint     checks the files of a model directory before loading; no torch
loader         loads the parts of a model that the stages need, with the modules below
linear         linear layers with packed weights for CPUs
layers         decoder layers, norms and MLPs as a few kernels; embeddings to logits
attention      attention over KV blocks and over images
vision         images to embeddings
cgroup         memory and CPUs that the container allows
memory         the KV cache: layout, size, buffer
runner         implements `engine.runner.Runner` with the modules above
build          builds a runner: loaded, memory allocated, warmed up
gpu            fused kernels and CUDA graphs for GPUs
"""
