"""Replaces parts of the model path on GPUs that `vlm_kernels.gpu.serves`.

layers         joined matrix products, fused additions and rotary embeddings; int8 and int4 weights
decode_steps   decode-only steps, and the static memory that graphs read
graphs         CUDA graphs of these steps, captured once and replayed
streams        image encoding overlapped with steps
compiled       torch.compile for the layers that are not replaced

`docs/decisions/0017` says what the tests cannot show without a GPU.
"""
