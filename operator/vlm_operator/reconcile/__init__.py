"""Runs the turns of a service, and deletes a service.

queue.py      decides which service gets the next turn, when and why; pure   WorkQueue
workers.py    runs the turns that the queue starts                Workers
service.py    observe ─▶ decide ─▶ plan ─▶ apply ─▶ report                  ServiceReconciler.turn
decisions.py  sizes the pools and plans a turn, as one value; pure         TurnPlan
writing.py    executes the plan; a turn may end between any two writes      execute
retries.py    holds back what the API server refused, with a backoff        Retries
report.py     writes status, Events, memory, metrics, log                   Reporter
tracking.py   remembers progress and write conflicts between turns          Tracker
accepted_spec.py  stores the last accepted manifest; pure                   AcceptedSpec
deletion.py   drains the gateways, then removes our finalizer
class_and_pool_status.py  reports on VLMNodeClasses, and on VLMPools without a service
"""
