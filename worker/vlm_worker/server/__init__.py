"""The interfaces of a worker: gRPC services, health, /stats, /metrics, data port; draining."""
