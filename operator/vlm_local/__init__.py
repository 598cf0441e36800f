"""A real control plane, and nodes that run pods as local processes, on one machine."""
