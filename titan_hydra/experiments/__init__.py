"""From a command line to a table: cells, runs, plans, launches, reports. Imports core alone."""
