"""Where ranks run: in this process, on this machine, on a SLURM cluster."""
