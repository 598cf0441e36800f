"""Simulates a service, with the operator's own autoscaling code. Deterministic for a seed.

trace.py       Request, Trace, recorded traces       generate.py  generated traces
hardware.py    speeds and memory of hardware         clock.py     simulated time
job.py         one request in flight                 pods.py      life cycle of a pod
computer.py    encoder and prefill pods              decoder.py   decode pods
pool.py        Deployments, nodes, drains            gateway.py   routing; meters.py: its metrics
cluster.py     the service, and an autoscaler's view run.py       a trace under an autoscaler
baselines/     other autoscalers                     triptych_policy.py  the operator's autoscaler
contenders.py  all autoscalers by name               scenario.py  services of the comparison
score.py       misses, hours and cost of a run       chart.py     SVG chart of points
settings.py    reads hardware from YAML              noise.py     random deviations
"""
