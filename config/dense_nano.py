base = "nano.py"
variant = "dense"
n_prelude, n_core, recurrence, n_coda = 6, 0, 1, 0
