"""SLURM: jobs through submitit and sbatch, their states from squeue and sacct."""
