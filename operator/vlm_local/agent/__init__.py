"""The node agent: nodes that are simulated, and the pods on them, which are not.

API server ─watch─▶ agent ─▶ one Pod task per pod ─▶ containers, each a real process in its own
    ▲                                                mount and pid namespace
    └──── status, leases, events ◀───────────────────┘     ▲ HTTPS: logs, exec, port-forward
"""
