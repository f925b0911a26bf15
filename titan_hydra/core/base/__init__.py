"""Errors and exit statuses, files, text and secrets: what all other folders of the package need. Imports no torch."""
