"""What a command of `vlm-worker` runs: parts put together, from start to last signal.

worker.py   one encoder, prefill or decode        local.py   every role in one process
gateway.py  the OpenAI API                        split.py   every role, a process each
"""
