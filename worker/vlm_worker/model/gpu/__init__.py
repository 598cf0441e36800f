"""Replaces parts of the model path on GPUs that `vlm_kernels.gpu.serves`.

layers         joined matrix products, fused additions and rotary embeddings
quantised      linear layers with int8 or int4 weights
walk           iterates over the modules of a model while they are replaced
decode_steps   decode-only steps, and the static memory that graphs read
graphs         CUDA graphs of these steps, captured once and replayed
streams        image encoding overlapped with steps
compiled       torch.compile for the layers that are not replaced

`docs/decisions/0017` says what the tests cannot show without a GPU.
"""
