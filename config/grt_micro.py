base = "micro.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 1, 1, 6, 1
