"""`vlm bench`: open-loop load on a service, with TTFT by stage and one outcome per request.

load.py         schedules and sends requests          report.py   summarises results
made_images.py  generates images that no cache has    command.py  the command
"""
