"""Converts messages to values, and errors to statuses. No other package uses protobuf."""
