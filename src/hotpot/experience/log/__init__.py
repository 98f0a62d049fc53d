"""The durable front: the write-ahead log, the ledger beside it, and the one step that writes both.

``wal`` owns the bytes, ``ledger`` the attempts, consumptions and marks, ``journal`` the step that acknowledges, ``recovery``
what a crash left, ``order`` the order of rows in a log segment.
"""
