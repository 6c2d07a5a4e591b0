"""What this machine can do: hardware, libraries, backends, known hazards, and what to install."""
