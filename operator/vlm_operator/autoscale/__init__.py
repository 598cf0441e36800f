"""Decides how many replicas each pool has, and why. Pure: no clock, no I/O.

policy.py view.py    inputs of a decision                inputs.py    built from manifests and pods
constants.py         constants of the method             outcome.py   its results and reasons
decide.py            one tick: estimate, then allocate   explain.py   reasons and numbers as text
estimating/          the need of each pool               allocation/  the replicas of each pool

memory.py            state that survives a restart
record.py            one tick as JSON, for replay
"""
