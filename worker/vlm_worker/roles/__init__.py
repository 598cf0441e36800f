"""What a worker does for a request, stage by stage, over one engine.

    encoder   pictures -> embeddings held for a consumer
    prefill   prompt and embeddings -> first token, KV held for a consumer
    decode    KV pulled or adopted -> tokens

`host` is what they share. Values in, values out: no gRPC here.
"""
