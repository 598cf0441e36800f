"""Runs each command of `vlm-worker`: builds its components, serves, and shuts down.

worker.py   one encoder, prefill or decode        local.py   every role in one process
gateway.py  the OpenAI API                        split.py   every role, a process each
fetch.py    downloads a model into a directory that pods mount
"""
