"""Tiers that hold opaque buffers; which of them are kept is decided in `core/`."""
