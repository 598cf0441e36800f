"""`vlm bench`: open-loop load on a service, with TTFT by stage and one outcome per request.

load.py  generates and sends requests    report.py  summarises results    command.py  the command
"""
