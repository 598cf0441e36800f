"""`vlm bench`: open-loop load against a service, with the time of each stage and exact accounting.

load.py   who is asked what, when, and what came of it      report.py   the figures
pictures.py   pictures that no cache has seen               command.py  the command
"""
