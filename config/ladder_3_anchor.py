# Rung 3: and the anchor, fed to every step.
base = "ladder_4_gate.py"
gate = False
