"""The engine: one thread that alone touches scheduler and runner."""
