"""`vlm advise`: from a running service's counters to its phases, its ITL slope and its levers.

command.py ─ /stats of all pods, several times ─▶ profile.py ─ Profile ─▶ levers.py ─▶ report
"""
