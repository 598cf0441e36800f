"""OpenAI's API as values: what comes in, checked to the last field, and what goes out."""
