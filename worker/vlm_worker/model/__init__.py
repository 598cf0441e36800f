"""How a step is computed: transformers' own modules with paged attention. The place with torch.

checkpoint   a model directory's files, checked before anything is loaded; no torch
loader       one modelling module, the halves that the stages need, weights
linear       weights in the order that a CPU multiplies fastest
layers       decoder layers as a few kernels
decoder      embeddings to logits, in one native call where all layers allow it
attention    what the modules call instead of their own attention
vision       pictures to embeddings
sampler      logits to tokens
container    memory and CPUs that are left to this process
memory       how much KV fits
warmup       the first pictures and the first steps
runner       all of it behind `engine.runner.Runner`
build        a runner that is ready: loaded, memory taken, warm
gpu          layers as fused kernels and decode as graphs, where there is a GPU
"""
