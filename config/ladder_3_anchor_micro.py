# Rung 3: and the anchor, fed to every step.
base = "ladder_4_gate_micro.py"
gate = False
