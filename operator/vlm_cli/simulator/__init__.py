"""Simulates a service, with the operator's own autoscaling code. Deterministic for a seed.

trace.py       Request, Trace, recorded traces       generate.py  generated traces
hardware.py    speeds, memory, random deviations     settings.py  reads hardware from YAML
job.py         simulated time, one request in flight pods.py      life cycle of a pod
computer.py    encoder and prefill pods              decoder.py   decode pods
pool.py        Deployments, nodes, drains            gateway.py   routing; meters.py: its metrics
cluster.py     the service, and an autoscaler's view run.py       a trace under an autoscaler
contenders.py  all autoscalers by name, also ours    scenario.py  services of the comparison
baselines.py   other autoscalers                     horizontal.py the arithmetic of HPA
score.py       misses, hours and cost of a run       chart.py     SVG chart of points
"""
