"""Writes the CustomResourceDefinitions and docs/api.md from the API's types."""
