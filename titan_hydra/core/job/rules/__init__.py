"""The rules that cells must satisfy, by subject."""
