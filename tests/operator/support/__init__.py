"""What tests of the operator, e2e and bench share.

fakes/           an API server in memory, its controllers, pods and faults
world            a service, its operator and a fake cluster
load             pods that report load
live             an operator on a real control plane
live_faults      the same behind a faulty proxy
operations       changes that a user makes
specs            generated manifests
audit            calls and metrics of an operator process
scale            100 services on nodes without processes
fleet            Deployments under a rollout
estimates        inputs of `estimate`
samples          reports of pods and gateways
sizing           a cluster that executes decisions
random_services  generated policies
simulated        small services and traces for the simulator
"""
