"""The engine: one thread that alone uses scheduler and runner.

    engine ──commands, turns──▶ state      the API of the roles and the thread; what the thread owns
    events ◀──────────────────────┤        event streams, delivered on the loop
                                  │
    encoder_batches  queue and calls of the encoder    encode_requests    encode calls, pinned items
    step_loop        one step of the language model    prompt_embeddings  embeddings for prompts
                                                       sequences          submit, receive, end

`attempts` records what each request holds, blocks that peers read included, and frees it. `runner`
is the interface to a model. `settings` has the settings and the statistics. `core/` decides what to
compute.
"""
