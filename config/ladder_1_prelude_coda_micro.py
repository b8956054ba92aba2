# Rung 1: and a prelude and a coda.
base = "ladder_2_noise_micro.py"
noise = 0
