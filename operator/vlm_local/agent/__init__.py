"""The node agent: simulated nodes whose pods are real processes.

API server ─watch─▶ agent ─▶ one Pod task per pod ─▶ containers, each a real process in its own
    ▲                                                mount and pid namespace
    └──── status, leases, events ◀───────────────────┘     ▲ HTTPS: logs, exec, port-forward
"""
