"""The worker images: batching engine, transfers and gateway of a VLM inference pool."""
