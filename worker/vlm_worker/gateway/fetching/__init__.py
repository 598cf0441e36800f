"""Fetches images by URL, from allowed hosts at public addresses only."""
