"""The lake: Delta tables in a folder or on S3, the thread that takes log segments there, and the bytes it may take.

``lake`` owns the tables and the watermark that makes them one, ``storage`` where they lie, ``layout`` and ``encoding`` how a
table's files look, ``archive`` and ``health`` the way from the log, ``budget`` the stop before the disk is full.
"""
