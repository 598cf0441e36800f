"""What to compute: pure bookkeeping without torch, clock or I/O."""
