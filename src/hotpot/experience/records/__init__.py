"""What a record is: its Arrow schema, its types, the way from older schema versions, and secrets taken out of it.

Knows the record classes of :mod:`hotpot.types`; no file, log or lake.
"""
