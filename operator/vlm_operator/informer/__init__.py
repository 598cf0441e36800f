"""What carries our labels, kept in memory: turns read here instead of asking the API server.

                        list, then watch: one of each per kind and watched namespace
API server ──events──▶ follow.py ─▶ store.py ◀─ answers of our own writes ─┐
                                       │ list()                            │
                        a turn ◀───────┴── reads.py ─────── writes ────────┴─▶ Fenced ─▶ API server

store.py   what is known of one kind, never older than what was written here; pure    Store
kept.py    what is kept of an object; pure
follow.py  keeps a store up to date, whatever becomes of the watch                    Informer
reads.py   the `Cluster` that reads from stores                                       Informed

docs/decisions/0015-turns-read-from-memory.md says why it may.
"""

from vlm_operator.informer.follow import Informer
from vlm_operator.informer.reads import Informed
from vlm_operator.informer.store import Store

__all__ = ["Informed", "Informer", "Store"]
