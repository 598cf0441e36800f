"""Turns the bytes of an image into patches. Untrusted files are decoded in child processes.

gateway   read_header(bytes)               size, format, orientation; no decoder runs
encoder   MediaPool.prepare(bytes, spec)   ──frame──▶ decode child ──frame──▶ PreparedImage
"""
