"""A service in simulated time, under the very same decisions as a real one. Pure but for seeds.

trace.py     Request, Trace, recorded traces         generate.py   made-up ones
plant.py     what hardware can do                    clock.py      simulated time
job.py       one request under way                   pods.py       a pod's life
computer.py  encoder and prefill pods                decoder.py    decode pods
pool.py      Deployments, nodes, drains              gateway.py    routing; meters.py: its counts
cluster.py   all of these, and what is seen of them  run.py        a trace under an autoscaler
ours.py      our autoscaler                          baselines/    what others do
scenario.py  the services that are compared          score.py      what a run was worth
compare.py   who runs against whom           mixed.py     node types, by price
foresight.py who knows the load beforehand
"""
