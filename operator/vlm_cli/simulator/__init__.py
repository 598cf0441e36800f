"""Simulates a service with the operator's autoscaling code. Deterministic for a seed.

trace.py       Request, Trace, recorded traces        generate.py     generated traces
hardware.py    speeds, memory, noise; their YAML file  job.py          clock, one request in flight
pod.py         life cycle of a pod, its interface      compute_pod.py  encoder and prefill pods
pool.py        Deployments, nodes, drains              decode_pod.py   decode pods
gateway.py     routing, KV reservations                gateway_metrics.py  TTFT by stage, ITL
cluster.py     the service, an autoscaler's view       run.py          a trace under an autoscaler
contenders.py  all autoscalers by name, also ours      scenario.py     services of the comparison
baselines.py   other autoscalers                       horizontal.py   the arithmetic of an HPA
score.py       missed minutes, hours, cost of a run    chart.py        SVG chart of points
"""
