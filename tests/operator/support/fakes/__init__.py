"""Fakes that behave: an API server, its controllers, pods that answer, a clock.

fields.py      server-side apply over flattened manifests: who owns which field
stored.py      one object: how it reads, what of it is refused
cluster.py     FakeCluster: uids, versions, generations, finalizers, garbage collection
watchable.py   WatchableCluster: the same, with watches
controllers.py what kube-controller-manager and kubelets would do     run_controllers, start_pods
downloads.py   what they would do with a claim and a Job                run_downloads
dying.py       a cluster that dies before or after write k, and all such deaths of one run
faults.py      what may become of a call, and which calls it happens to
proxy.py       a reverse proxy with such faults, in front of a real API server
"""

from support.fakes.cluster import Clock, FakeCluster
from support.fakes.controllers import FakeScraper, Saying, run_controllers, sample_of, start_pods
from support.fakes.downloads import run_downloads
from support.fakes.dying import Deaths, Died, DyingCluster, WatchedWrites
from support.fakes.watchable import WatchableCluster

__all__ = [
    "Clock",
    "Deaths",
    "Died",
    "DyingCluster",
    "FakeCluster",
    "FakeScraper",
    "Saying",
    "WatchableCluster",
    "WatchedWrites",
    "run_controllers",
    "run_downloads",
    "sample_of",
    "start_pods",
]
