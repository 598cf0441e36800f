"""Decides how many replicas each pool has, and why. Pure: no clock, no I/O.

policy.py view.py    inputs of a decision                inputs.py    built from manifests and pods
tuning.py            constants of the method             outcome.py   its results
decide.py            one tick: estimate, then allocate   reasons.py   closed lists of reasons
estimating/          the need of each pool               explain.py   reasons as text
allocation/          the replicas of each pool           decision_numbers.py numbers as text

memory.py            state that survives a restart
record.py codec.py   one tick as JSON, for replay
"""
