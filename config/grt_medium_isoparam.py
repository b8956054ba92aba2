base = "medium.py"
variant = "grt"
n_prelude, n_core, recurrence, n_coda = 2, 20, 4, 2
