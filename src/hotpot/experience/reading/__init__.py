"""The way back out: SQL and columns over lake and log, each record exactly once, now or as of an update.

``snapshot`` is one consistent look at a run while its writer goes on, ``moments`` cuts it, ``reader`` asks it, ``columns`` and
``arrangement`` go round the database for whole columns, ``analytics`` is the door for people.
"""
