"""OpenAI's API as values: validated requests and errors."""
