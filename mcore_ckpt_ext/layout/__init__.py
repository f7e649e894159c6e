"""Which parameter lies where in a flat gradient buffer: rules, parameter orders, recovery, the proof."""
