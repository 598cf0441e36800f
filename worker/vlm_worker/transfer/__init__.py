"""Moves KV blocks and embeddings between pods: the consumer fetches, the producer holds a lease.

consumer   LeaseKeeper.hold ── pull ──▶ checked units, then the commit
producer   Producer: the units that any consumer may read so far
"""
