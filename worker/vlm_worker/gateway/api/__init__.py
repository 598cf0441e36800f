"""OpenAI's API as values: validated requests, answers and errors."""
