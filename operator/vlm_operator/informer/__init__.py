"""Watch caches of labelled objects and all VLMPools, so that turns read from memory.

API server ── list, watch ──▶ Informer ─▶ Store ◀── answers to our writes ────┐
                                            │ list()                          │
                        a turn ◀── CachedClient ───────── writes ─────────────┴─▶ Fenced

store.py      objects of one kind, never older than our own writes; pure
reflector.py  Informer: lists and watches one kind. CachedClient: a `Cluster` that reads from stores

docs/decisions/0015-turns-read-from-memory.md gives the reasons.
"""
