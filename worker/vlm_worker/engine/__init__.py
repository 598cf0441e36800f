"""The engine: one thread that alone uses scheduler and runner.

    engine ──commands, turns──▶ state      the API of the roles and the thread; what the thread owns
    events ◀──────────────────────┤        event streams, delivered on the loop
                                  │
    encoder_batches  queue and calls of the encoder    encode_requests    encode calls, pinned items
    embedding_reads  what fills the encoder's cache    prompt_embeddings  embeddings for prompts
    step_loop        one step of the language model    sequences          submit, receive, end
    kv_pruning       drops KV of text between steps

`attempts` records what each request holds, blocks that peers read included, and frees it. `runner`
is the interface to a model. `embedding_files` has the files of the disk tier and their thread.
`settings` has the settings and the statistics. `core/` decides what to compute.
"""
