base = "small.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 1, 10, 10, 1
