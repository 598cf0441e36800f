"""The worker package: batching engine, transfers and gateway of a VLM inference service."""
