"""What the model path does otherwise on a GPU; asked for where `vlm_kernels.gpu.serves` a device.

layers         products joined, additions and rotations inside the kernels beside them
quantised      int8 or int4 weights
walk           through a model, as both replace its parts
decode_steps   which steps are decode alone, and the memory that they are read from
graphs         those steps, captured once and replayed
streams        pictures beside steps, and how their rows are handed over
compiled       layers that stay torch's, compiled by it at start

What of it a GPU has yet to show stands in `docs/decisions/0017`.
"""
