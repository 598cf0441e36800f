"""`vlm top`: load of services and pods, from two reads of /stats.

command.py ─ lists of services and pods, /stats ─▶ Snapshot ─┬▶ rows.py ─▶ Row ─▶ table
                                                  Snapshot ─┘
"""
