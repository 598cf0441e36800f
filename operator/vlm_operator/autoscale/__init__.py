"""How many replicas each pool should have, and why: values in, values out, no clock, no I/O.

policy.py view.py    what a decision is made from        inputs.py    read from manifests and pods
decide.py            one tick: estimate, then settle     outcome.py   what it returns
estimating/          what each pool needs                reasons.py   why, as closed lists
settling/            how many replicas it gets           explain.py   why, for people

memory.py record.py codec.py            what survives a restart; a tick that can be replayed
"""
