"""Errors and exit statuses, files, text and secrets: what every room needs. Imports no torch."""
