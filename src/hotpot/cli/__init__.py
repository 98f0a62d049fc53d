"""The command line: one file per command, nothing heavy imported before a command runs.

``main`` the program and its exit codes · ``runs_folder`` from what the user typed to a run · ``output`` tables, JSON, CSV
"""
