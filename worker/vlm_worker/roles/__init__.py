"""Runs the calls of a request, stage by stage, over one engine.

    encoder   images -> embeddings held for a consumer
    prefill   prompt and embeddings -> first token, KV held for a consumer
    decode    KV pulled or adopted -> tokens

`context` has the state that they share. Values in, values out: no gRPC here.
"""
