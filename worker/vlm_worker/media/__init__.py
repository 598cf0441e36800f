"""From the bytes of a picture to patches, behind a wall: hostile files meet a child that may die.

gateway   read_header(bytes)               size, format, orientation; no decoder runs
encoder   MediaPool.prepare(bytes, spec)   ──frame──▶ decode child ──frame──▶ PreparedImage
"""
