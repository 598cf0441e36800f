"""The wire: bytes and messages <-> values, statuses <-> errors. Nothing else knows protobuf."""
