# Rung 4: and the gate, which is all of GRT.
base = "grt_micro.py"
