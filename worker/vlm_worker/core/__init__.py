"""Decisions and state of the engine: scheduling, caches, memory. Pure: no torch, clock or I/O."""
