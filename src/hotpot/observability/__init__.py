"""Seeing what a run does and did: everything here reads records, nothing decides.

``queries`` registered metrics over a run · ``gauges`` memory and processor of the process · ``trace`` the file Perfetto
opens · ``summary`` the one JSON at the end · ``live`` the table while it runs · ``show`` one trajectory, step by step ·
``lineage`` which versions a run used · ``run_changes``, ``version_changes``, ``jumps`` what their changes did ·
``changes``, ``scopes`` what differs between two versions or runs · ``files`` atomic writing
"""
