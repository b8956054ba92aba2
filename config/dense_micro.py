base = "micro.py"
variant = "dense"
n_prelude, n_core, recurrence, n_coda = 8, 0, 1, 0
