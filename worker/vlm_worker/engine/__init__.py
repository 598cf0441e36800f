"""The engine: one thread that alone uses scheduler and runner.

    engine ──commands──▶ thread ──turn──▶ state        API of the roles; the thread; what it owns
    events ◀───────────────────────────────┤           event streams, delivered on the loop
                                           │
      encoder_batches  one encoder call                encode_requests    encode calls, pinned items
      step_loop        one step of the language model  prompt_embeddings  embeddings for prompts
      isolation        failures of single model calls  sequences          submit, find, end
      embedding_cache  buffers of the encoder cache    queue_limits       limits of the queue
                                                       kv_handoff         KV to and from peers
                                                       readable_blocks    blocks that peers read

`attempts` records what each request holds, and frees it. `runner` is the interface to a model.
`settings` has the settings and the statistics. `usage` counts the KV bytes of answers. `core/`
decides what to compute.
"""
