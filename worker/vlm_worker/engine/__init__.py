"""The engine: one thread that alone touches scheduler and runner.

    engine ──commands──▶ thread ──turn──▶ state        what roles call; what runs it; what it owns
    events ◀── outbox ◀────────────────────┤           what it says meanwhile
                                           │
      encoder_queue    one call of the encoder         pictures         who waits for an embedding
      stepping         one step of the language model  prompt_images    embeddings into prompts
      guard            calls of the model may fail     sequences        in, found, ended
                                                       room             whether one more may wait
                                                       handover         KV to and from peers
                                                       exports, loans   blocks that peers' threads
                                                                        read, or write

`runner` is what it asks of a model; `settings` what it is told, and tells when asked; `sink` what
hangs on a sequence; `usage` what answers had taken. What to compute is decided in `core/`.
"""
