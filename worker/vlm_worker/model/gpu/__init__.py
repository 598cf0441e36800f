"""What the model path does otherwise on a GPU; asked for where `vlm_kernels.gpu.serves` a device.

layers      products joined, additions and rotations inside the kernels beside them
quantised   int8 or int4 weights
graphs      steps of decode, captured once and replayed
side        pictures encoded beside decode, on a stream of their own
compiled    blocks of vision towers, by torch.compile
"""
