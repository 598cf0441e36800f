"""KV blocks and embeddings between pods: the consumer pulls, the producer holds under a lease.

consumer   LeaseKeeper.hold ── pull ──▶ checked units, then the commit
producer   Outgoing: what may be read so far, to whoever asks
"""
