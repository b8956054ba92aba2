base = "small.py"
variant = "dense"
n_prelude, n_core, recurrence, n_coda = 12, 0, 1, 0
