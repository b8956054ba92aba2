base = "medium.py"
variant = "dense"
n_prelude, n_core, recurrence, n_coda = 24, 0, 1, 0
