"""`vlm logs`: the logs of all pods of a service in order of time.

command.py ─ pods, their logs ─▶ Line ─▶ lines.py: which lines, in which order ─▶ output
"""
