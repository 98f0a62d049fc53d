"""What may enter the record: rules, refusals, the doors they stand at, and the breaker behind them.

``rules`` judge one trajectory, ``admission`` a whole call, ``entrance`` remembers between calls; ``door`` makes records of what
other programs bring.
"""
