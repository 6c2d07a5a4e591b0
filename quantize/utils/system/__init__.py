"""The machine and the process: GPU, versions, hub, locks, signals, memory."""
