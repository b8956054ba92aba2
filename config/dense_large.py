base = "large.py"
variant = "dense"
n_prelude, n_core, recurrence, n_coda = 36, 0, 1, 0
