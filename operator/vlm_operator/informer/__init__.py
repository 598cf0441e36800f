"""Watch caches of labelled objects and all VLMPools, so that turns read from memory.

API server ── list, watch ──▶ reflector.py ─▶ store.py ◀── answers to our writes ────┐
                                                 │ list()                            │
                        a turn ◀── cached_client.py ────────── writes ───────────────┴─▶ Fenced

store.py          objects of one kind, never older than our own writes; pure       Store
transform.py      reduces objects to the fields that a store keeps; pure           transform
reflector.py      lists and watches one kind into a store                          Informer
cached_client.py  implements `Cluster` with reads from stores                      CachedClient

docs/decisions/0015-turns-read-from-memory.md gives the reasons.
"""

from vlm_operator.informer.cached_client import CachedClient
from vlm_operator.informer.reflector import Informer, label_of
from vlm_operator.informer.store import Store

__all__ = ["CachedClient", "Informer", "Store", "label_of"]
