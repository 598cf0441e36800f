"""How many replicas each pool should have, and why: values in, values out, no clock, no I/O.

policy.py view.py    what a decision is made from        inputs.py    read from manifests and pods
tuning.py            the constants of the method         outcome.py   what it returns
decide.py            one tick: estimate, then settle     reasons.py   why, as closed lists
estimating/          what each pool needs                explain.py   why, for people
settling/            how many replicas it gets           reckoning.py with the numbers

memory.py record.py codec.py            what survives a restart; a tick that can be replayed
"""
