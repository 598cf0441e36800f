"""A worker seen from outside: gRPC services and health, /stats and /metrics, and how it drains."""
